"""One request while it runs: its tokens, its drafter, its place in the cache, its books.

The invariant that everything here keeps: the target has committed every token of ``tokens`` but the last one. The last
one is the root of the next tree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from draftwood.config import SamplingParams
from draftwood.drafters import Drafter, DraftRequest, PromptRows, VerifiedTree
from draftwood.engine.events import BONUS_SOURCE, TokenEvent, TokenLogprobs
from draftwood.engine.stats import RequestStats
from draftwood.engine.stopping import StopStrings, StopTokens
from draftwood.errors import TreeError
from draftwood.sampling import SeededRandomness, Warper
from draftwood.sizing import Load, Sizer
from draftwood.targets import ForwardOutput, Segment, TargetInfo, chain_parents
from draftwood.text import IncrementalDecoder, TextCodec
from draftwood.tree import DraftTree
from draftwood.verify import AcceptedPath, accept_greedy, accept_predrawn, accept_sampled, upcoming_numbers

UNWRITTEN = ("", False)  # of a token whose text nobody reads
DRAFTER_STREAM = 1  # keeps a drafter's draws apart from those of verification under one seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What was asked for, checked and ready to run."""

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int  # what was asked for, less what the context has no room for
    budget: int
    max_capacity: int  # positions of the whole cache
    prefill_chunk: int
    group: int  # the samples of one prompt belong together
    index: int = 0  # which of them this is
    reuse: bool = False  # whether a cached prefix may stand in for prefill
    with_text: bool = True  # whether somebody reads the text of its events
    prediction: tuple[int, ...] = ()  # the output that somebody expects


class Drafted(NamedTuple):
    """A drafter's answer to one request in one cycle."""

    tree: DraftTree | Exception
    budget: int  # nodes that it was asked for
    seconds: float


class Session:
    def __init__(
        self,
        request: Request,
        drafter: Drafter,
        codec: TextCodec,
        info: TargetInfo,
        sizer: Sizer | None = None,
    ) -> None:
        """``sizer``: cuts each cycle's tree to the size that pays best, within the budget; None: always the budget."""
        params = request.params
        self.request = request
        self.drafter = drafter
        self.tokens = list(request.prompt_ids)
        self.sequence = -1  # set on admission
        self.stats = RequestStats(prompt_tokens=len(request.prompt_ids))
        self.finish_reason: str | None = None
        self.error: Exception | None = None  # what ended it, if it was an error
        # Whether the target's greedy choices alone do not say what is emitted, or are not all that is asked for.
        self.reads_logits = not params.is_greedy or params.has_penalties or params.logprobs is not None
        # Whether anybody but acceptance looks at what the target says beside its greedy choices.
        wanted = (drafter.wants_logits, drafter.wants_prompt_logits, drafter.wants_top, drafter.wants_taps)
        self.reads_rows = params.logprobs is not None or any(wanted)
        self.is_prefilling = len(request.prompt_ids) > 1
        self._takes_choices = params.is_greedy and not params.has_penalties
        self._writes = request.with_text or bool(params.stop)
        self._sizer = sizer
        self._vocab_size = info.vocab_size
        self._num_prompt = len(request.prompt_ids)
        self._committed = 0  # prompt positions the target has, until prefill is over
        self._offered = self._tree = DraftTree.root_only(self.tokens[-1])  # the drafter's tree, and what is verified
        self._admitted = 0.0
        self.warper = Warper(params, request.prompt_ids)
        self._randomness = SeededRandomness(params.seed, request.index)
        self._stop_tokens = StopTokens(params, info.eos_token_ids, request.max_tokens)
        self._stop_strings = StopStrings(params.stop)
        self._decoder = IncrementalDecoder(codec)

    @property
    def capacity(self) -> int:
        """Cache positions the request gets: all it can need, or all there are."""
        wished = len(self.request.prompt_ids) + self.request.max_tokens + self.request.budget
        return min(wished, self.request.max_capacity)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.request.prompt_ids) :]

    @property
    def _reads_prompt(self) -> bool:
        """Whether the drafter gets the prompt's logits."""
        return self.drafter.wants_prompt_logits and (self._sizer is None or self._sizer.reads_prompts)

    @property
    def is_sized(self) -> bool:
        """Whether its trees depend on what the other requests ask of a pass."""
        return self._sizer is not None

    def admit(self, sequence: int, reused: int) -> None:
        """The request starts to run; the first ``reused`` positions of its prompt are in the cache already."""
        self.sequence = sequence
        self.stats.reused_tokens = reused
        self._note_committed(reused)
        self._admitted = time.perf_counter()
        if self._sizer is not None:
            self._sizer.begin(pausing=self.request.params.is_greedy)  # draws must not depend on the clock
        seed = self.request.params.seed
        spawn_key = (self.request.index, DRAFTER_STREAM)
        rng = np.random.default_rng(None if seed is None else np.random.SeedSequence(seed, spawn_key=spawn_key))
        try:
            self.drafter.begin(DraftRequest(self.request.prompt_ids, self.request.params, rng, self.request.prediction))
        except Exception as error:  # noqa: BLE001 - a drafter is anybody's code; its request alone ends
            self._fail(error)

    def _note_committed(self, num_positions: int) -> None:
        self._committed = num_positions
        self.is_prefilling = num_positions < self._num_prompt - 1

    # -- the parts of a cycle, in order ------------------------------------------------------------------------------

    @property
    def load(self) -> Load:
        """What this request is about to ask of a pass, going by its last tree."""
        if self.is_prefilling or self._sizer is None:
            return Load(len(self._tree), 1.0)
        return Load(len(self._tree), self._sizer.expected if len(self._tree) > 1 else 1.0)

    @property
    def wants_tree(self) -> bool:
        """Whether its drafter is to be asked: the prompt is read, and nothing went wrong."""
        return self.error is None and not self.is_prefilling

    @property
    def wanted_nodes(self) -> int:
        """How large a tree the drafter should offer at most. Before the last token guesses are of no use."""
        budget = self.request.budget
        if budget == 1 or self._num_left <= 1:
            return 1
        return budget if self._sizer is None else min(budget, self._sizer.wanted)

    @property
    def _num_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.max_tokens - (len(self.tokens) - self._num_prompt)

    def propose(self, drafted: Drafted | None, load: Load) -> Segment | None:
        """A stretch of the prompt, or what the drafter has made; None if it failed. ``load``: of the others."""
        if self.error is not None:
            return None
        try:
            return self._segment(drafted, load)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)
            return None

    @property
    def num_unread(self) -> int:
        """Positions of the prompt that its next pass reads, while it is prefilling."""
        return min(self.request.prefill_chunk, self._num_prompt - 1 - self._committed)

    def _segment(self, drafted: Drafted | None, load: Load) -> Segment:
        if drafted is None:
            chunk = self.request.prompt_ids[self._committed : self._committed + self.num_unread]
            num_logits = len(chunk) if self._reads_prompt else 0
            return Segment(self.sequence, chunk, chain_parents(len(chunk)), num_logits)
        tree = self._tree = self._cut_tree(drafted, load)
        return Segment(self.sequence, tree.tokens, tree.parents, len(tree.tokens))

    def read_prompt(self, segment: Segment, output: ForwardOutput) -> None:
        start = self._committed
        self._note_committed(start + len(segment.token_ids))
        if segment.num_logits or self.drafter.wants_taps:
            try:
                self.drafter.read_prompt(PromptRows(start, output.logits, output.top, output.taps))
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(error)

    @property
    def draws_at_once(self) -> bool:
        """Whether the token after each node of its tree is one draw, whatever the path."""
        params = self.request.params
        return not (params.is_greedy or params.has_penalties or self.is_prefilling or self._tree.proposals)

    def looks(self, drawn: Sequence[int] | None) -> bool:
        """Whether it looks at rows of this cycle's output: for acceptance, unless its tokens were drawn, or else."""
        return self.reads_rows or (drawn is None and self.reads_logits and not self.is_prefilling)

    def numbers(self) -> list[float]:
        """Those that draw the token after each node of its tree."""
        return upcoming_numbers(self._tree, self._randomness)

    def take(
        self, output: ForwardOutput, choices: Sequence[int], drawn: Sequence[int] | None = None
    ) -> tuple[AcceptedPath, TokenEvent | None]:
        """Accepts, emits and learns; no event if that failed. ``drawn``: the token after each node, if that is known;
        then nothing in ``output`` is needed for acceptance."""
        accepted = AcceptedPath((0,), 0)
        try:
            accepted = self.accept(output, choices) if drawn is None else self._accept_drawn(drawn)
            return accepted, self.emit(accepted, output, choices)
        except Exception as error:  # noqa: BLE001 - as above; a model that gives no numbers ends here too
            self._fail(error)
            return accepted, None

    def _fail(self, error: Exception) -> None:
        self.error = error
        self.finish_reason = "error"

    def accept(self, output: ForwardOutput, choices: Sequence[int]) -> AcceptedPath:
        """The longest path the target agrees with. ``choices`` are the target's greedy ids, one a node."""
        if self._takes_choices:
            return accept_greedy(self._tree, choices)
        params, tree, warper, logits = self.request.params, self._tree, self.warper, output.logits
        if params.is_greedy:
            return accept_greedy(tree, lambda node: warper.choice(logits[node], tree.path_tokens(node)))
        return accept_sampled(tree, lambda node: warper.probs(logits[node], tree.path_tokens(node)), self._randomness)

    def _accept_drawn(self, tokens: Sequence[int]) -> AcceptedPath:
        return accept_predrawn(self._tree, tokens, self._randomness)

    def emit(self, accepted: AcceptedPath, output: ForwardOutput, choices: Sequence[int]) -> TokenEvent:
        """Takes the accepted tokens into the output, up to a stop condition, and tells the drafter."""
        tree, path = self._tree, accepted.path
        token_ids, texts, finish_reason = self._cut(accepted.token_ids(tree))
        size = len(token_ids)
        self.tokens += token_ids
        if not self._takes_choices:
            self.warper.commit(token_ids)
        self._count(accepted, size)
        if self._sizer is not None:
            self._sizer.note(self._offered, tree, token_ids)
        self.finish_reason = finish_reason
        self.drafter.observe(VerifiedTree(tree, output.logits, choices, path, token_ids, output.taps, output.top))
        return TokenEvent(
            request_id=self.request.request_id,
            token_ids=tuple(token_ids),
            sources=(*[tree.sources[node] for node in path[1:]], BONUS_SOURCE)[:size],
            texts=texts,
            logprobs=self._logprobs(token_ids, path, output.logits),
            finish_reason=finish_reason,
            stats=self.stats,
            tree=tree,
            path=path,
        )

    # -- details -----------------------------------------------------------------------------------------------------

    def _cut_tree(self, drafted: Drafted, load: Load) -> DraftTree:
        """The drafter's tree, cut to what pays, to what fits, and to what can still be emitted."""
        tree, budget, seconds = drafted
        if isinstance(tree, Exception):
            raise tree
        self._offered = tree
        size, root, last = len(tree.tokens), tree.tokens[0], self.tokens[-1]
        if size == 1 and root == last:  # what is in the text already is always in order
            self.stats.draft_seconds += seconds
            return tree
        started = time.perf_counter() - seconds
        least, most = min(tree.tokens), max(tree.tokens)
        if size > budget or root != last or least < 0 or most >= self._vocab_size:
            raise TreeError(
                f"The drafter {self.drafter.name!r} proposed a tree that cannot be verified",
                got=f"{size} nodes, root token {root}, tokens {least} to {most}",
                allowed=f"at most {budget} nodes, root token {last}, tokens 0 to {self._vocab_size - 1}",
            )
        context = len(self.tokens) - 1
        if self._sizer is not None:
            tree = self._sizer.cut(tree, context, time.perf_counter() - started, load)
        tree = tree.first(self.capacity - context)
        tree = tree.limit_depth(self._num_left - 1)
        self.stats.draft_seconds += time.perf_counter() - started
        return tree

    def _cut(self, candidates: list[int]) -> tuple[list[int], tuple[str, ...], str | None]:
        """Goes through the accepted tokens one by one, exactly as plain decoding would, until one ends the output.

        The tokens up to there, their texts, and why they end it if they do.
        """
        texts: tuple[str, ...] = ()
        num_output = len(self.tokens) - self._num_prompt
        for token_id in candidates:
            num_output += 1
            reason = self._stop_tokens.reason(token_id, num_output)
            shown, stopped = self._write(token_id, reason) if self._writes else UNWRITTEN
            texts += (shown,)
            if stopped or reason is not None:
                return candidates[: len(texts)], texts, "stop" if stopped else reason
        return candidates, texts, None

    def _write(self, token_id: int, reason: str | None) -> tuple[str, bool]:
        """The text that the token makes certain, up to a stop string, and whether there was one."""
        text = "" if reason == "stop" else self._decoder.push(token_id)
        shown, stopped = self._stop_strings.feed(text)
        if reason is not None and not stopped:
            rest, stopped = self._stop_strings.feed(self._decoder.flush())
            shown += rest if stopped else rest + self._stop_strings.flush()
        return shown, stopped

    def _count(self, accepted: AcceptedPath, num_emitted: int) -> None:
        stats = self.stats
        now = time.perf_counter()
        if stats.cycles == 0:
            stats.first_token_seconds = now - self._admitted
        stats.total_seconds = now - self._admitted
        stats.note_tree(self._tree, accepted.path[1 : num_emitted + 1], num_emitted)

    def _logprobs(
        self, token_ids: Sequence[int], path: Sequence[int], logits: torch.Tensor
    ) -> tuple[TokenLogprobs, ...]:
        wanted = self.request.params.logprobs
        if wanted is None:
            return ()
        rows = logits[list(path[: len(token_ids)])].log_softmax(dim=-1)  # [emitted, V]
        best, best_ids = rows.topk(min(wanted, rows.shape[-1]), dim=-1)
        own = rows[torch.arange(len(token_ids)), list(token_ids)].tolist()
        return tuple(
            TokenLogprobs(token_id, logprob, tuple(zip(ids, values, strict=True)))
            for token_id, logprob, ids, values in zip(token_ids, own, best_ids.tolist(), best.tolist(), strict=True)
        )
