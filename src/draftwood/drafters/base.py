"""The contract of a drafter: a few calls around every request.

    drafter.begin(request)            the prompt is known
    drafter.read_prompt(rows)         what the target says along it, where the drafter wants that
    drafter.propose(budget)           a tree of at most ``budget`` nodes whose root is the last committed token
    drafter.observe(verified)         what the target said about it and what was emitted
    drafter.end()                     the request is over: finished, cancelled or failed

A drafter never sees the target's cache. What all requests of one model share (a corpus, heads) is made once by
``share``, or by ``attach`` where it takes more of the target than facts. What a drafter learns lives in a memory
(``new_memory``), which lasts as long as its scope says: memory.py. Drafters that run a model of their own do so for
all requests at once (``propose_batch``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from draftwood.config import SamplingParams
from draftwood.drafters.memory import Memory
from draftwood.targets import Target, TargetInfo, TopRows, top_rows
from draftwood.text import TextCodec
from draftwood.tree import DraftTree

PREDICTION_TAIL = 16  # tokens of the prompt once more behind a prediction: as many as any n-gram that is looked up


class DraftRequest(NamedTuple):
    prompt_ids: Sequence[int]
    params: SamplingParams
    rng: np.random.Generator  # for drawn drafts; apart from the randomness of verification
    prediction: Sequence[int] = ()  # what the user expects as output, to be copied from

    @property
    def known_text(self) -> Sequence[int]:
        """What can be copied from; it ends as the prompt does. A prediction stands behind the prompt, as its output
        would, and is what was seen last: it is found at once, and before all else."""
        if not self.prediction:
            return self.prompt_ids
        return [*self.prompt_ids, *self.prediction, *self.prompt_ids[-PREDICTION_TAIL:]]


class PromptRows(NamedTuple):
    """A stretch of the prompt that was prefilled. As in ``VerifiedTree``, the tensor is only lent."""

    start: int  # place of its first token in the prompt
    logits: torch.Tensor  # [n, V] float32, row i is what the target says after token start + i; [0, V] if not wanted
    top: TopRows | None = None  # the best entries of every row, where the target found them already
    taps: torch.Tensor | None = None  # [n, T*H], where they are wanted

    def best(self, k: int) -> TopRows:
        """The k best entries of every row."""
        return _best(self.logits, self.top, k)


class VerifiedTree(NamedTuple):
    """One verified tree. The tensors are the target's own memory, which its next forward writes to again."""

    tree: DraftTree
    logits: torch.Tensor  # [N, V] float32, row i is what the target says after node i; maybe [0, V] if not wanted
    choices: Sequence[int]  # [N] the likeliest token of each row, before any warping
    path: Sequence[int]  # accepted nodes, root first
    emitted: Sequence[int]  # tokens the cycle added to the output, the bonus token last
    taps: torch.Tensor | None  # [N, T*H]
    top: TopRows | None = None  # the best entries of every row, where the target found them already

    def best(self, k: int, rows: Sequence[int] | None = None) -> TopRows:
        """The k best entries of every row of logits, or of some ``rows``, in that order."""
        return _best(self.logits, self.top, k, rows)


def _best(logits: torch.Tensor, top: TopRows | None, k: int, rows: Sequence[int] | None = None) -> TopRows:
    """From what the target found, if that is enough; else from the logits."""
    if top is None or top.ids.shape[1] < k:
        return top_rows(logits, k, rows)
    return (top if rows is None else top.at(rows)).first(k)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOptions:
    """A drafter without options."""


class Drafter(ABC):
    """One request's drafter. Subclasses name their options record, and read it in their constructor."""

    name: ClassVar[str]
    summary: ClassVar[str] = ""  # one line, shown by `draftwood drafters` and in the tables of the documentation
    guesses_from: ClassVar[str] = ""  # where the guesses come from
    tree_shape: ClassVar[str] = ""  # how the tree is built, with default options
    copies_text: ClassVar[bool] = False  # whether it copies from ``known_text``, and so profits from a prediction
    draws_by_default: ClassVar[bool] = False  # whether children are sampled: seeds give other texts than plain
    Options: ClassVar[type[Any]] = NoOptions
    wants_prompt_logits: bool = False  # whether prefill computes logits for read_prompt
    wants_logits: bool = True  # whether ``observe`` looks at more than what was emitted and the greedy choices
    wants_top: int = 0  # how many of the best entries of each row it asks for: `best` of VerifiedTree and PromptRows
    wants_taps: tuple[int, ...] = ()  # hidden states it reads, of the whole prompt too: as ``Target.set_taps`` has them
    drafts_in_batch: ClassVar[bool] = False  # whether propose_batch is more than one propose after the other

    def __init__(self, options: Any, shared: Any, memory: Any = None) -> None:
        self.options = options
        self.shared = shared
        self.memory = memory

    @classmethod
    def check(cls, options: Any) -> None:
        """Refuses options that no target could do with; asked before a model is loaded."""

    @classmethod
    def share(cls, options: Any, target: TargetInfo) -> Any:
        """What the requests of one model have in common and nobody changes; built once."""
        return None

    @classmethod
    def attach(cls, options: Any, target: Target, codec: TextCodec) -> Any:
        """As ``share``, for drafters that run models themselves."""
        return cls.share(options, target.info)

    @classmethod
    def new_memory(cls, options: Any, target: TargetInfo, shared: Any) -> Memory | None:
        """Empty tables for what requests teach this drafter; None if it learns nothing that outlives a request."""
        return None

    @abstractmethod
    def begin(self, request: DraftRequest) -> None: ...

    def read_prompt(self, rows: PromptRows) -> None:
        """What the target says along a stretch of the prompt. Stretches come in order, between ``begin`` and the first
        ``propose``, and only where ``wants_prompt_logits`` or ``wants_taps`` say so.

        What the cache had already, what another sample of the prompt prefilled and the prompt's last token, which is
        the first root, do not come here; with ``budget auto`` nothing does where a second position is not cheap. Where
        ``wants_taps`` asks for hidden states, all of the prompt but its last token is prefilled anew and comes. Who
        wants the likeliest tokens asks ``rows.best(k)`` and says in ``wants_top`` how many, so that the target finds
        them by the way.
        """

    @abstractmethod
    def propose(self, budget: int) -> DraftTree: ...

    @classmethod
    def propose_batch(cls, drafters: Sequence[Any], budgets: Sequence[int]) -> list[DraftTree]:
        """The trees of several requests of one LLM, where ``drafts_in_batch`` says so."""
        return [drafter.propose(budget) for drafter, budget in zip(drafters, budgets, strict=True)]

    def observe(self, verified: VerifiedTree) -> None:
        """Learn from a verified tree, and take note of what was emitted."""

    def end(self) -> None:
        """Let go of what the request held."""
