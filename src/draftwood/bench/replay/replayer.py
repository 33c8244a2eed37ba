"""Replaying: a recorded text is drafted again, by any drafter and budget, and no model runs.

The text says which guesses are right: a child that carries the next token of the text is accepted, as exact
verification would have it. The rows say what the drafter may learn. Nodes whose context was not recorded are left out
of the tree that the drafter is told about, as ``budget="auto"`` leaves out what does not pay. They count as drafted.
What it would have learned from them is missing, so its tau comes out too low where much is left out (likeness.py).

Drawn children are taken for right where they carry the recorded token. For the drafter whose run was recorded that is
what happened; for another it stands in for a draw, since verification would have settled on a token of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood.bench.records import BenchMethod
from draftwood.bench.replay.dense_rows import DenseRows, heights
from draftwood.bench.replay.nearest_rows import NearestRows
from draftwood.bench.replay.recording import RecordedRequest, Recording
from draftwood.bench.replay.rows import ON_TEXT, IdRows, LogprobRows, RowStore
from draftwood.config import PREFILL_CHUNK
from draftwood.drafters import Drafter, DraftRequest, PromptRows, Verified, check_drafter, make_factory
from draftwood.engine import DRAFTER_STREAM, RequestStats
from draftwood.errors import OptionError, TreeError
from draftwood.progress import Progress, report
from draftwood.tree import DraftTree
from draftwood.verify import walk

LENT_NUMBERS = 1 << 24  # of logits at most when a prompt is read: 64 MB
OWN_CONTEXTS = ("lookahead",)  # learn from contexts that no other drafter visits


class TextRows(NamedTuple):
    """A text with the rows behind its tokens."""

    tokens: tuple[int, ...]  # [n]
    ids: IdRows  # [n, K]
    above: LogprobRows  # [n, K]
    known: npt.NDArray[np.bool_]  # [n]


class ReplayScript:
    """A recorded request made ready to be replayed."""

    def __init__(self, request: RecordedRequest, vocab_size: int) -> None:
        arrays = request.rows.arrays()
        self.request = request
        self.book: RowStore = request.rows
        self.ids = arrays.ids
        self.above = heights(arrays.logprobs, vocab_size)

    @cached_property
    def likeness(self) -> NearestRows:
        return NearestRows(self.request)

    def part(self, end: int) -> TextRows:
        """The first ``end`` tokens of the text."""
        found = [self.book.find(ON_TEXT, position) for position in range(end)]
        known = np.array([row is not None for row in found], np.bool_)
        rows = [row or 0 for row in found]
        return TextRows(self.request.text[:end], self.ids[rows], self.above[rows], known)


class CycleTimes(NamedTuple):
    propose_seconds: float
    observe_seconds: float


@dataclass(kw_only=True, slots=True)
class ReplayResult:
    """One replayed request."""

    request: RecordedRequest
    stats: RequestStats = field(default_factory=RequestStats)
    cycles: list[CycleTimes] = field(default_factory=list)
    read_seconds: float = 0.0  # what the drafter took over the prompt: to begin, and to read its rows
    off_text: int = 0  # drafted nodes that are not on the text
    off_text_known: int = 0  # those of them whose rows were recorded
    off_text_estimated: int = 0  # those that were given the rows of contexts that end alike


def check_method(recording: Recording, method: BenchMethod) -> None:
    """Refuses a method that a recording cannot replay."""
    if not isinstance(method.budget, int):
        raise OptionError(
            f"The budget of {method.label} depends on what passes cost, and here none are made",
            got=method.budget,
            allowed="a number of positions, as in --budget 16",
        )
    top_k = getattr(check_drafter(method.drafter, method.options)[1], "top_k", 0)
    if top_k > recording.width:
        raise OptionError(
            f"{method.label} learns more of each row than was recorded",
            got=f"top_k {top_k}",
            allowed=f"at most {recording.width}",
            next_step=f"Record the runs again with --width {top_k}.",
        )
    recorded = {entry["drafter"] for entry in recording.methods}
    if method.drafter in OWN_CONTEXTS and method.drafter not in recorded:
        raise OptionError(
            f"{method.drafter} learns from guesses that only itself makes, and they were not recorded",
            got=f"a recording of {', '.join(sorted(recorded)) or 'no method'}",
            next_step=f"Record it too: draftwood bench record --drafters {method.drafter},...",
        )


def replay(
    recording: Recording,
    method: BenchMethod,
    *,
    estimate: bool = False,
    before: Callable[[int], TextRows | None] | None = None,
    progress: Progress | None = None,
) -> list[ReplayResult]:
    """Every recorded request, in order, with the memory that the method's scope says.

    ``estimate``: nodes whose rows were not recorded are not left out but get those of a context that ends alike.
    ``before``: from a request's number to a text that stands before its prompt.
    """
    check_method(recording, method)
    factory = make_factory(method.drafter, method.options, recording.target, method.memory)
    replayer = _Replayer(recording, int(method.budget), estimate=estimate)
    groups: dict[tuple[str, str, int], int] = {}
    results: list[ReplayResult] = []
    held: list[Drafter] = []  # a prompt's first sample: their common memory lasts as long as one of them holds it
    for number, request in enumerate(recording.requests):
        report(progress, f"replaying {method.label}", number, len(recording.requests))
        is_first = request.group not in groups
        drafter = factory.new(groups.setdefault(request.group, len(groups)))
        if is_first:
            held[:] = [drafter]
        text = None if before is None else before(number)
        results.append(replayer.run(request, drafter, text, reads_prompt=is_first))
    report(progress, f"replaying {method.label}", len(recording.requests), len(recording.requests))
    return results


class _Replayer:
    def __init__(self, recording: Recording, budget: int, *, estimate: bool) -> None:
        self._target = recording.target
        self._estimate = estimate
        self._budget = budget
        self._dense = DenseRows(recording.target.vocab_size)
        self._chunk = max(1, min(PREFILL_CHUNK, LENT_NUMBERS // recording.target.vocab_size))

    def run(
        self, request: RecordedRequest, drafter: Drafter, before: TextRows | None, *, reads_prompt: bool
    ) -> ReplayResult:
        """``reads_prompt``: the engine prefills a prompt once, for its first sample."""
        script = ReplayScript(request, self._target.vocab_size)
        texts = [script.part(len(request.prompt_ids))]
        if before is not None:
            texts.insert(0, before)
        prompt_ids = [token for text in texts for token in text.tokens]
        result = ReplayResult(request=request, stats=RequestStats(prompt_tokens=len(prompt_ids)))
        began = time.perf_counter()
        drafter.begin(DraftRequest(prompt_ids, request.params, _rng(request)))
        result.read_seconds = time.perf_counter() - began
        if reads_prompt and drafter.wants_prompt_logits:
            result.read_seconds += self._read(drafter, texts)
        while result.stats.output_tokens < len(request.output_ids):
            self._cycle(script, drafter, result)
        drafter.end()
        return result

    def _read(self, drafter: Drafter, texts: Sequence[TextRows]) -> float:
        """The drafter is shown the rows of all tokens but the last, which is the first root."""
        known = np.concatenate([text.known for text in texts])
        known[-1] = False
        ids, above = np.concatenate([text.ids for text in texts]), np.concatenate([text.above for text in texts])
        seconds = 0.0
        for start, end in _stretches(known, self._chunk):
            logits = self._dense.lend(ids[start:end], above[start:end])
            began = time.perf_counter()
            drafter.read_prompt(PromptRows(start, logits))
            seconds += time.perf_counter() - began
        return seconds

    def _cycle(self, script: ReplayScript, drafter: Drafter, result: ReplayResult) -> None:
        request, stats = script.request, result.stats
        root = len(request.prompt_ids) + stats.output_tokens - 1  # its position in the text
        began = time.perf_counter()
        tree = drafter.propose(self._budget)
        proposed = time.perf_counter()
        if len(tree) > self._budget or tree.tokens[0] != request.text[root]:
            raise TreeError(
                f"The drafter {drafter.name!r} proposed a tree that cannot be verified",
                got=f"{len(tree)} nodes, root token {tree.tokens[0]}",
                allowed=f"at most {self._budget} nodes, root token {request.text[root]}",
            )
        if len(tree) > 1:
            room = min(request.max_tokens, self._target.context_length - len(request.prompt_ids))
            tree = tree.limited(room - stats.output_tokens - 1)
        on_text, rows = places(tree, script, root)
        path = [node for node, place in enumerate(on_text) if place is not None]
        emitted = request.output_ids[stats.output_tokens :][: len(path)]
        stats.note_tree(tree, path[1 : len(emitted) + 1], len(emitted))
        result.off_text += len(tree) - len(path)
        result.off_text_known += sum(
            row is not None and place is None for row, place in zip(rows, on_text, strict=True)
        )
        if self._estimate:
            result.off_text_estimated += estimate_rows(tree, script, root, on_text, rows)
        told = self._told(script, tree, rows, emitted)
        observing = time.perf_counter()
        drafter.observe(told)
        result.cycles.append(CycleTimes(proposed - began, time.perf_counter() - observing))

    def _told(
        self, script: ReplayScript, tree: DraftTree, rows: Sequence[int | None], emitted: Sequence[int]
    ) -> Verified:
        """What the drafter learns of a cycle: the part of its tree whose rows are known."""
        kept = [node for node, row in enumerate(rows) if row is not None]
        if len(kept) < len(tree):
            tree = replace(tree, proposals={}, num_chosen={}).part(kept)
        numbers = [row for row in rows if row is not None]
        ids = script.ids[numbers]
        choices: list[int] = ids[:, 0].tolist()
        logits = self._dense.lend(ids, script.above[numbers])
        return Verified(tree, logits, choices, find_path(tree, emitted, choices, script.request), list(emitted), None)


def places(tree: DraftTree, script: ReplayScript, root: int) -> tuple[list[int | None], list[int | None]]:
    """For every node its position in the text, if it is on it, and its row, if it is known.

    ``root`` is the position of the tree's root.
    """
    text, find = script.request.text, script.book.find
    on_text: list[int | None] = [root]
    rows = [find(ON_TEXT, root)]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        above, row = on_text[parent], rows[parent]
        if above is not None and above + 1 < len(text) and text[above + 1] == token:
            on_text.append(above + 1)
            rows.append(find(ON_TEXT, above + 1))
        else:
            on_text.append(None)
            rows.append(None if row is None else find(row, token))
    return on_text, rows


def estimate_rows(
    tree: DraftTree, script: ReplayScript, root: int, on_text: Sequence[int | None], rows: list[int | None]
) -> int:
    """Puts likely rows where ``rows`` has none, below nodes that have one; returns how many."""
    estimated = 0
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if rows[node] is None and rows[parent] is not None and on_text[node] is None:
            rows[node] = script.likeness.nearest(tree.tokens[parent], tree.tokens[node], root)
            estimated += rows[node] is not None
    return estimated


def find_path(tree: DraftTree, emitted: Sequence[int], choices: Sequence[int], request: RecordedRequest) -> list[int]:
    """The accepted nodes. The engine cuts a block at a stop token only after it accepted all of it, so the path goes on
    behind the stop: along the target's choices, or along what was accepted there when it was recorded."""
    is_choice = request.params.is_greedy and not request.params.has_penalties
    tokens, depths = (*emitted, *request.behind), tree.depths

    def token_after(node: int) -> int:
        if depths[node] >= len(emitted) and is_choice:
            return choices[node]
        return tokens[depths[node]] if depths[node] < len(tokens) else -1

    return list(walk(tree, token_after).path)


def _stretches(known: npt.NDArray[np.bool_], longest: int) -> Iterator[tuple[int, int]]:
    """The runs of True, none longer than ``longest``: where each starts and ends."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(np.int8)))
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        for at in range(start, end, longest):
            yield at, min(at + longest, end)


def _rng(request: RecordedRequest) -> np.random.Generator:
    """The draws of the drafter, as the engine seeds them; without a seed they are at least the same in every replay."""
    key = (request.sample, DRAFTER_STREAM)
    return np.random.default_rng(np.random.SeedSequence(request.params.seed or 0, spawn_key=key))
