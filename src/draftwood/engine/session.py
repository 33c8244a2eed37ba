"""The state of one sample while it runs.

Invariant: the target has committed every token of ``tokens`` but the last one, which is the root of the next tree.
"""

import time
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from draftwood.drafters import Drafter, DraftRequest, PlainDrafter
from draftwood.engine.output import OutputWriter
from draftwood.engine.requests import Sample
from draftwood.engine.stats import RequestStats
from draftwood.sampling import SeededRandomness, Warper
from draftwood.sizing import Sizer
from draftwood.targets import TargetInfo
from draftwood.text import TextCodec
from draftwood.tree import DraftTree

DRAFTER_STREAM = 1  # separates a drafter's random numbers from those of verification under one seed


class Session:
    """``with session:`` isolates errors: an exception ends this session only, and is kept in ``error``."""

    __slots__ = (  # a cycle reads dozens of them for each request: without a dict that takes half as long
        "_prompt_array", "admitted", "budget", "can_rest", "capacity", "draft_group", "draft_seconds", "drafter",
        "drafts", "draws", "draws_ahead", "error", "events_read_logits", "finish_reason", "has_begun", "has_left",
        "is_calibrated", "is_prefilling", "is_resting", "learn_seconds", "learns_prompt", "matcher", "max_length",
        "max_tokens", "may_draw_ahead", "may_rest", "num_committed", "num_prompt", "num_read", "num_skipped",
        "num_wanted", "offered", "params", "randomness", "reads_logits", "reads_rows", "sample", "sequence", "sizer",
        "stats", "takes_choices", "tokens", "tree", "vocab_size", "warper", "writer",
    )  # fmt: skip

    def __init__(
        self, sample: Sample, drafter: Drafter, codec: TextCodec, info: TargetInfo, sizer: Sizer | None = None
    ) -> None:
        """``sizer`` cuts each cycle's tree to the size that pays best, within the budget; None: no cut."""
        request = sample.request
        self.sample = sample
        self.params = request.params
        self.drafter = drafter
        # Sessions with the same group are drafted together; None: alone.
        together = drafter.drafts_in_batch and not drafter.proposes_alone
        self.draft_group = (type(drafter), id(drafter.shared)) if together else None
        self.drafts = sample.budget > 1 and type(drafter).propose is not PlainDrafter.propose
        self.sizer = sizer
        self.vocab_size = info.vocab_size
        self.sequence = -1  # set on admission
        self.capacity = 0  # positions of its sequence, the tree included
        self.budget, self.max_tokens = sample.budget, sample.max_tokens
        self.tokens = list(request.prompt_ids)
        self._prompt_array: npt.NDArray[np.int32] | None = None
        self.num_prompt = len(request.prompt_ids)
        self.max_length = self.num_prompt + sample.max_tokens  # tokens, with all that may be emitted
        self.num_read = self.num_prompt  # tokens that prefill has to commit, all but the last: the prompt at first
        self.num_committed = 0  # of those, in the target's cache; not updated after prefill
        self.is_prefilling = self.num_read > 1  # whether some are missing; kept, since it is read often
        self.tree = DraftTree.root_only(self.tokens[-1])  # under verification
        self.offered = self.tree  # what the drafter proposed, before it was cut
        self.num_wanted = 1  # nodes that it was allowed
        self.draft_seconds = 0.0  # of that tree
        self.learn_seconds = 0.0  # that the drafter took to learn from the last one
        self.learns_prompt: bool | None = None  # whether its drafter gets the prompt's logits; None: not decided yet
        self.has_begun = False  # whether its drafter knows the prompt
        self.is_resting = False  # whether its drafter is left out of this cycle
        self.has_left = False  # whether its drafter is left out of all further cycles
        self.num_skipped = 0  # last tokens, from cycles that it was left out of
        self.matcher = None if request.structure is None else request.structure.start()
        self.warper = Warper(self.params, request.prompt_ids)
        self.randomness = SeededRandomness(self.params.seed, sample.index)
        self.writer = OutputWriter(
            self.params, codec, info.eos_token_ids, max_tokens=sample.max_tokens, with_text=request.with_text
        )
        self.stats = RequestStats(prompt_tokens=self.num_prompt)
        self.admitted = 0.0  # by the clock of ``time.perf_counter``
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        # Whether the target's greedy choices are the output: no sampling, no penalties, no structure.
        self.takes_choices = self.params.is_greedy and not self.params.has_penalties and self.matcher is None
        # Whether its drafts decide, with a seed, which text comes out. Then they must not depend on measured times.
        self.draws = drafter.draws_for(self.params, is_timed=sizer is not None)
        # Whether its drafts may be left out because of measured times.
        self.can_rest, self.is_calibrated = drafter.can_rest, drafter.is_calibrated  # they do not change
        can_pause = self.can_rest or drafter.can_leave
        self.may_rest = self.drafts and sizer is not None and can_pause and not self.draws
        # Whether the caller needs more than tokens.
        wants_rows = self.events_read_logits = self.params.logprobs is not None or request.with_cycles
        # Whether the token after a node is one draw from the distribution there, and whether the target makes it.
        self.may_draw_ahead = not (self.params.is_greedy or self.params.has_penalties or self.matcher is not None)
        self.draws_ahead = self.may_draw_ahead and info.can_draw
        # Whether the host needs logits, for the caller or for acceptance.
        self.reads_logits = wants_rows or self.draws or not (self.takes_choices or self.draws_ahead)
        # Whether anything but acceptance reads rows of the target's output.
        wanted = (drafter.wants_logits, drafter.wants_prompt_logits, drafter.wants_top, drafter.wants_taps)
        self.reads_rows = wants_rows or any(wanted)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self.fail(error)
        return True

    def fail(self, error: Exception) -> None:
        """Ends this session with an error."""
        self.error = error
        self.finish_reason = "error"

    @property
    def num_unread(self) -> int:
        """Positions of its next pass, while it is prefilling."""
        return min(self.sample.prefill_chunk, self.num_read - 1 - self.num_committed)

    @property
    def num_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_length - len(self.tokens)

    @property
    def room(self) -> int:
        """Nodes of a tree that fit into the cache."""
        return self.capacity - len(self.tokens) + 1

    @property
    def num_expected(self) -> float:
        """Tokens expected from the last tree."""
        return 1.0 if self.sizer is None or len(self.tree) == 1 else self.sizer.expected

    def rest(self) -> None:
        """Decodes plainly in this cycle, at the cost of plain decoding."""
        self.is_resting, self.num_wanted, self.draft_seconds = True, 1, 0.0
        self.tree = self.offered = DraftTree.root_only(self.tokens[-1])

    @property
    def was_ready(self) -> bool:
        """Whether the time of its last draft says something about later ones."""
        return self.is_resting or self.drafter.was_ready

    def leave(self) -> None:
        """Goes on without its drafter, which cannot catch up later."""
        if not self.has_left:
            self.has_left = True
            if self.has_begun:
                with self:
                    self.drafter.end()

    def begin_drafting(self) -> None:
        """Shows the prompt to the drafter: before its first cycle, so that one which always rests costs nothing."""
        if self.has_begun:
            return
        self.has_begun = True
        seed, spawn_key = self.params.seed, (self.sample.index, DRAFTER_STREAM)
        rng = np.random.default_rng(None if seed is None else np.random.SeedSequence(seed, spawn_key=spawn_key))
        request, sizer = self.sample.request, self.sizer
        position_cost = 0.0 if sizer is None else sizer.position_cost(self.num_prompt)
        with self:
            self.drafter.begin(
                DraftRequest(request.prompt_ids, self.params, rng, request.prediction, sizer is not None, position_cost)
            )

    def wake(self) -> bool:
        """Tells the drafter what it missed, if anything. False if that failed."""
        self.is_resting = False
        self.begin_drafting()
        if self.num_skipped and self.error is None:
            skipped, self.num_skipped = self.tokens[-self.num_skipped :], 0
            with self:
                self.drafter.skip(skipped)
        return self.error is None

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def prompt_array(self) -> npt.NDArray[np.int32]:
        if self._prompt_array is None:
            self._prompt_array = np.asarray(self.sample.request.prompt_ids, np.int32)
        return self._prompt_array

    @property
    def token_array(self) -> npt.NDArray[np.int32]:
        return self.prompt_array if len(self.tokens) == self.num_prompt else np.asarray(self.tokens, np.int32)

    @property
    def was_admitted(self) -> bool:
        return self.admitted > 0.0

    @property
    def can_be_suspended(self) -> bool:
        """A head must see the hidden states of the whole text, which are gone once it has been read."""
        return not self.drafter.wants_taps

    def suspend(self) -> None:
        """Its slots were given back. It goes on when it is admitted again, with all tokens that it has now."""
        self.sequence = -1
        self.num_read = len(self.tokens)
        self._start_reading(0)

    def _start_reading(self, num_committed: int) -> None:
        self.num_committed = 0
        self.note_read(num_committed)

    def note_read(self, count: int) -> None:
        """So many further tokens of what it reads are in the cache."""
        self.num_committed += count
        self.is_prefilling = self.num_committed < self.num_read - 1

    def admit(self, sequence: int, reused: int, capacity: int) -> None:
        """Starts the sample, or goes on with it; its first ``reused`` tokens are in the cache already."""
        self.sequence, self.capacity = sequence, capacity
        self._start_reading(reused)
        if self.was_admitted:
            return
        self.stats.reused_tokens = reused
        self.admitted = time.perf_counter()
        if self.sizer is not None:
            self.sizer.begin(pausing=not self.draws)
