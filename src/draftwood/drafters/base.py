"""The drafter interface: a few calls per request.

    drafter.begin(request)            the prompt is known
    drafter.read_prompt(rows)         the target's logits and taps along the prompt, if the drafter wants them
    drafter.propose(budget)           returns a tree of at most ``budget`` nodes; its root is the last committed token
    drafter.observe(verified)         the target's outputs for that tree, and the emitted tokens
    drafter.skip(token_ids)           tokens of cycles that it was left out of, if it allows that (``can_rest``)
    drafter.end()                     the request has finished, failed or been cancelled

A drafter never sees the target's cache. State that all requests of one model share (a corpus, a head) is created once
by ``share``, or by ``attach`` if that needs the target itself. What a drafter learns is kept in a memory
(``new_memory``), whose scope sets how long it lives (memory.py).

A drafter may also work for all requests of a batch at once (``propose_batch``, ``observe_batch``): one that runs a
model of its own, or one whose work is a call into C.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from draftwood.compiled import Outcomes
from draftwood.config import SamplingParams
from draftwood.drafters.memory import Memory
from draftwood.targets import DeviceAnswer, Target, TargetInfo, TopRows, top_rows
from draftwood.text import TextCodec
from draftwood.tree import DraftTree

PREDICTION_TAIL = 16  # prompt tokens repeated after a prediction; at least the length of any n-gram lookup


class DraftRequest(NamedTuple):
    prompt_ids: Sequence[int]
    params: SamplingParams
    rng: np.random.Generator  # for drawn children; independent of the randomness of verification
    prediction: Sequence[int] = ()  # token ids of the predicted output
    is_timed: bool = False  # whether the time of drafting matters: budget="auto"
    position_cost: float = 0.0  # of a further position in a small pass, relative to a pass over one; 0: not known

    @property
    def known_text(self) -> Sequence[int]:
        """The text to copy from. A prediction follows the prompt, as the output would, and then the end of the prompt
        is repeated: so the first lookup matches the start of the prediction."""
        if not self.prediction:
            return self.prompt_ids
        return [*self.prompt_ids, *self.prediction, *self.prompt_ids[-PREDICTION_TAIL:]]


class PromptRows(NamedTuple):
    """One prefilled chunk of the prompt. As in ``VerifiedTree``, the tensors are only valid during the call."""

    start: int  # position of its first token in the prompt
    logits: torch.Tensor  # [n, V] float32, row i predicts the token after start + i; [0, V] if not wanted
    top: TopRows | None = None  # top entries of every row, if the target computed them
    taps: torch.Tensor | None = None  # [n, T*H], if wanted

    def best(self, k: int) -> TopRows:
        """The top k entries of every row."""
        return _best(self.logits, self.top, k)


class VerifiedTree(NamedTuple):
    """One verified tree. The tensors are views of target memory that the next forward pass overwrites."""

    tree: DraftTree
    logits: torch.Tensor  # [N, V] float32, row i predicts the token after node i; may be [0, V] if not wanted
    choices: Sequence[int]  # [N] argmax of each row, before any warping
    path: Sequence[int]  # accepted nodes, root first
    emitted: Sequence[int]  # tokens the cycle added to the output, the bonus token last
    taps: torch.Tensor | None  # [N, T*H]
    top: TopRows | None = None  # top entries of every row, if the target computed them

    def best(self, k: int, rows: Sequence[int] | None = None) -> TopRows:
        """The top k entries of every row of logits, or of the given ``rows`` in that order."""
        return _best(self.logits, self.top, k, rows)


class VerifiedBatch(NamedTuple):
    """The verified trees of several requests."""

    outcomes: Outcomes
    first_rows: Sequence[int]  # of each tree, in ``top``
    top: TopRows | None  # of all rows of the pass: at least ``wants_top`` entries each; None if that is 0


def _best(logits: torch.Tensor, top: TopRows | None, k: int, rows: Sequence[int] | None = None) -> TopRows:
    """Use the entries that the target computed if there are enough, else compute them from the logits."""
    if top is None or top.ids.shape[1] < k:
        return top_rows(logits, k, rows)
    return (top if rows is None else top.at(rows)).first(k)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOptions:
    """Options of a drafter that has none."""


class Drafter(ABC):
    """Drafts for one request. Subclasses set ``Options`` to their options dataclass."""

    name: ClassVar[str]
    summary: ClassVar[str] = ""  # one line, shown by `draftwood drafters` and in the tables of the documentation
    guesses_from: ClassVar[str] = ""  # where the guesses come from
    tree_shape: ClassVar[str] = ""  # how the tree is built, with default options
    copies_text: ClassVar[bool] = False  # whether it copies from ``known_text``, and so profits from a prediction
    is_calibrated: ClassVar[bool] = False  # whether probabilities of nodes are learned acceptance rates
    Options: ClassVar[type[Any]] = NoOptions
    draws: bool = False  # whether it may draw children when sampling; ``draws_for`` says for which requests it does
    wants_prompt_logits: bool = False  # whether prefill computes logits for ``read_prompt``
    wants_logits: bool = True  # whether ``observe`` reads logits, not only emitted tokens and greedy choices
    wants_top: int = 0  # top entries per row that the target computes in the same pass, for ``best(k)``
    min_chance: float = 0.0  # of a path: less likely ones would be cut off; set before ``propose`` if ``is_calibrated``
    lesson: float = 0.0  # tokens that later trees gain from the first node that is verified, even if it is wrong
    wants_taps: tuple[int, ...] = ()  # layers whose hidden states it reads, as in ``Target.set_taps``
    allows_gaps: bool = False  # with ``wants_taps``: whether it can do without those of cached tokens
    drafts_in_batch: bool = False  # whether ``propose_batch`` does more than call ``propose`` in a loop
    learns_in_batch: bool = False  # whether ``observe_batch`` may replace ``observe``; it reads only top entries
    runs_model: bool = False  # whether it drafts with a model, on the target's device
    was_ready: bool = True  # with ``runs_model``: False if passes of the last draft had to be prepared before they ran
    drafts_ahead: bool = False  # whether ``draft_ahead`` does something
    can_rest: bool = False  # whether it may be left out of cycles and is then told their tokens with ``skip``
    can_leave: bool = False  # whether a request may go on without it: after ``end`` it is not called again

    proposes_alone: ClassVar[bool] = False  # whether a subclass changed ``propose`` and not ``propose_batch``
    observes_alone: ClassVar[bool] = False  # whether a subclass changed ``observe`` and not ``observe_batch``

    def draws_for(self, params: SamplingParams, *, is_timed: bool) -> bool:
        """Whether it draws children for such a request. Then its trees decide which text a seed gives, so they must not
        depend on measured times. ``is_timed``: as in ``DraftRequest``."""
        return self.draws and not params.is_greedy

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether it must see the hidden states of the whole prompt."""
        return bool(self.wants_taps) and not self.allows_gaps

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A subclass that changes ``propose`` or ``observe`` alone is called for each request: the method for batches
        that it inherits would leave the change out. One that changes ``observe`` and not ``skip`` sees every cycle."""
        super().__init_subclass__(**kwargs)
        if not _changes_together(cls, "observe", "skip"):
            cls.can_rest = False
        cls.proposes_alone = not _changes_together(cls, "propose", "propose_batch")
        cls.observes_alone = not _changes_together(cls, "observe", "observe_batch")

    def __init__(self, options: Any, shared: Any, memory: Any = None) -> None:
        self.options = options
        self.shared = shared
        self.memory = memory

    @classmethod
    def check(cls, options: Any) -> None:
        """Raise for options that are invalid with any target; called before a model is loaded."""

    @classmethod
    def share(cls, options: Any, target: TargetInfo) -> Any:
        """Build the read-only state that all requests of one model share; called once."""
        return None

    @classmethod
    def attach(cls, options: Any, target: Target, codec: TextCodec) -> Any:
        """As ``share``, for drafters that need the target itself."""
        return cls.share(options, target.info)

    @classmethod
    def new_memory(cls, options: Any, target: TargetInfo, shared: Any) -> Memory | None:
        """Create an empty memory; None if the drafter learns nothing that outlives a request."""
        return None

    @abstractmethod
    def begin(self, request: DraftRequest) -> None: ...

    def read_prompt(self, rows: PromptRows) -> None:
        """Learn from the target's outputs along one chunk of the prompt.

        Chunks come in order, between ``begin`` and the first ``propose``, if ``wants_prompt_logits`` or ``wants_taps``
        is set. Left out are tokens that were already cached, tokens that another sample of the prompt prefilled, and
        the last prompt token, which is the first root. With ``budget="auto"`` a prompt is left out if computing its
        logits would take longer than the passes that they save (``Sizer.reads_prompt``). With ``wants_taps`` and not
        ``allows_gaps``, the whole prompt but its last token is prefilled and passed here.
        For the top-k tokens call ``rows.best(k)`` and set ``wants_top``, so that the target computes them in its pass.
        """

    @abstractmethod
    def propose(self, budget: int) -> DraftTree: ...

    @classmethod
    def propose_batch(cls, drafters: Sequence[Any], budgets: Sequence[int]) -> list[DraftTree]:
        """Propose trees for several requests of one LLM; used if ``drafts_in_batch``."""
        return [drafter.propose(budget) for drafter, budget in zip(drafters, budgets, strict=True)]

    def draft_ahead(self, answer: DeviceAnswer, budget: int) -> None:
        """The device runs the target's pass over the last tree. A drafter whose model runs there too may queue its next
        draft, of about ``budget`` nodes, right after that pass. The next ``propose`` may have to drop it: the text can
        become another one than the device accepts."""

    def observe(self, verified: VerifiedTree) -> None:
        """Learn from a verified tree and append the emitted tokens."""

    @classmethod
    def observe_batch(cls, drafters: Sequence[Any], verified: VerifiedBatch) -> None:
        """As ``observe`` for several requests of one LLM; used if all of them set ``learns_in_batch``."""
        raise NotImplementedError(f"{cls.__name__} sets learns_in_batch and has no observe_batch")

    def skip(self, token_ids: Sequence[int]) -> None:
        """Append tokens that were emitted without a tree of this drafter; called before the next ``propose``."""
        raise NotImplementedError(f"{type(self).__name__} sets can_rest and has no skip")

    def end(self) -> None:
        """Release what the request holds."""


def _changes_together(cls: type, first: str, second: str) -> bool:
    """Whether the first method comes from no later class than the second."""
    latest = next(base for base in cls.__mro__ if first in vars(base) or second in vars(base))
    return second in vars(latest)
