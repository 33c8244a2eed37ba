"""Replays a recorded text with any drafter and budget, without a model.

The text decides which draft tokens are accepted: a child with the next token of the text is, as in exact verification.
The recorded rows are what the drafter learns from. Nodes whose context was not recorded are removed from the tree that
the drafter observes, as ``budget="auto"`` removes nodes, but they count as drafted. The drafter cannot learn from them,
so tau is too low if many are missing (see nearest_rows.py).

Drawn children are accepted if they carry the recorded token. For the recorded drafter this is what happened. For
another drafter it is an approximation: real verification would have sampled its own token.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from draftwood.drafters import Drafter, DraftRequest, PromptRows, VerifiedTree, check_drafter, make_factory
from draftwood.engine import DRAFTER_STREAM, RequestStats
from draftwood.errors import OptionError, TreeError
from draftwood.progress import Progress, report
from draftwood.tree import DraftTree
from draftwood.verify import walk

MAX_LOGITS = 1 << 24  # per chunk of a prompt: 64 MB
OWN_CONTEXTS = ("lookahead",)  # learn from contexts that no other drafter visits


class TextRows(NamedTuple):
    """A text with the target's rows after its tokens."""

    tokens: tuple[int, ...]  # [n]
    ids: IdRows  # [n, K]
    above: LogprobRows  # [n, K]
    known: npt.NDArray[np.bool_]  # [n]


class ReplayScript:
    """A recorded request prepared for replay."""

    def __init__(self, request: RecordedRequest, vocab_size: int) -> None:
        arrays = request.rows.arrays()
        self.request = request
        self.book: RowStore = request.rows
        self.ids = arrays.ids
        self.above = heights(arrays.logprobs, vocab_size)

    @cached_property
    def likeness(self) -> NearestRows:
        return NearestRows(self.request)

    def slice(self, end: int) -> TextRows:
        """Return the first ``end`` tokens of the text with their rows."""
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
    read_seconds: float = 0.0  # drafter time for the prompt: begin and read_prompt
    off_text: int = 0  # drafted nodes that are not on the text
    off_text_known: int = 0  # of these, with recorded rows
    off_text_estimated: int = 0  # of these, with rows of similar contexts


def check_method(recording: Recording, method: BenchMethod) -> None:
    """Raise if the recording cannot replay the method."""
    if not isinstance(method.budget, int):
        raise OptionError(
            f"The budget of {method.label} depends on the cost of passes, and a replay runs none",
            got=method.budget,
            allowed="a number of positions, as in --budget 16",
        )
    top_k = getattr(check_drafter(method.drafter, method.options)[1], "top_k", 0)
    if top_k > recording.width:
        raise OptionError(
            f"{method.label} uses more tokens per row than were recorded",
            got=f"top_k {top_k}",
            allowed=f"at most {recording.width}",
            next_step=f"Record the runs again with --width {top_k}.",
        )
    recorded = {entry["drafter"] for entry in recording.methods}
    if method.drafter in OWN_CONTEXTS and method.drafter not in recorded:
        raise OptionError(
            f"{method.drafter} learns from its own draft tokens, which were not recorded",
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
    """Replay every recorded request, in order, with the method's memory scope.

    ``estimate``: nodes without recorded rows are kept, with the rows of a similar context.
    ``before``: maps a request's index to a text to put before its prompt.
    """
    check_method(recording, method)
    factory = make_factory(method.drafter, method.options, recording.target, method.memory)
    replayer = _Replayer(recording, int(method.budget), estimate=estimate)
    groups: dict[tuple[str, str, int], int] = {}
    results: list[ReplayResult] = []
    first_drafters: list[Drafter] = []  # first sample of a prompt: keeps the memory shared by its samples alive
    for number, request in enumerate(recording.requests):
        report(progress, f"replaying {method.label}", number, len(recording.requests))
        is_first = request.group not in groups
        drafter = factory.new(groups.setdefault(request.group, len(groups)))
        if is_first:
            first_drafters[:] = [drafter]
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
        self._chunk = max(1, min(PREFILL_CHUNK, MAX_LOGITS // recording.target.vocab_size))

    def run(
        self, request: RecordedRequest, drafter: Drafter, before: TextRows | None, *, reads_prompt: bool
    ) -> ReplayResult:
        """Replay one request. ``reads_prompt``: the engine prefills a prompt once, for its first sample."""
        script = ReplayScript(request, self._target.vocab_size)
        texts = [script.slice(len(request.prompt_ids))]
        if before is not None:
            texts.insert(0, before)
        prompt_ids = [token for text in texts for token in text.tokens]
        result = ReplayResult(request=request, stats=RequestStats(prompt_tokens=len(prompt_ids)))
        began = time.perf_counter()
        drafter.begin(DraftRequest(prompt_ids, request.params, _rng(request)))
        result.read_seconds = time.perf_counter() - began
        if reads_prompt and drafter.wants_prompt_logits:
            result.read_seconds += self._read_prompt(drafter, texts)
        while result.stats.output_tokens < len(request.output_ids):
            self._run_cycle(script, drafter, result)
        drafter.end()
        return result

    def _read_prompt(self, drafter: Drafter, texts: Sequence[TextRows]) -> float:
        """Pass the drafter the rows of all tokens but the last, which is the first root."""
        known = np.concatenate([text.known for text in texts])
        known[-1] = False
        ids, above = np.concatenate([text.ids for text in texts]), np.concatenate([text.above for text in texts])
        seconds = 0.0
        for start, end in _split_runs(known, self._chunk):
            logits = self._dense.fill(ids[start:end], above[start:end])
            began = time.perf_counter()
            drafter.read_prompt(PromptRows(start, logits))
            seconds += time.perf_counter() - began
        return seconds

    def _run_cycle(self, script: ReplayScript, drafter: Drafter, result: ReplayResult) -> None:
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
            tree = tree.limit_depth(room - stats.output_tokens - 1)
        on_text, rows = locate_nodes(tree, script, root)
        path = [node for node, place in enumerate(on_text) if place is not None]
        emitted = request.output_ids[stats.output_tokens :][: len(path)]
        stats.note_tree(tree, path[1 : len(emitted) + 1], len(emitted))
        result.off_text += len(tree) - len(path)
        result.off_text_known += sum(
            row is not None and place is None for row, place in zip(rows, on_text, strict=True)
        )
        if self._estimate:
            result.off_text_estimated += estimate_rows(tree, script, root, on_text, rows)
        verified = self._make_verified(script, tree, rows, emitted)
        observing = time.perf_counter()
        drafter.observe(verified)
        result.cycles.append(CycleTimes(proposed - began, time.perf_counter() - observing))

    def _make_verified(
        self, script: ReplayScript, tree: DraftTree, rows: Sequence[int | None], emitted: Sequence[int]
    ) -> VerifiedTree:
        """Build what the drafter observes: the part of its tree with known rows."""
        kept = [node for node, row in enumerate(rows) if row is not None]
        if len(kept) < len(tree):
            tree = tree.replace(proposals={}, num_chosen={}).select(kept)
        numbers = [row for row in rows if row is not None]
        ids = script.ids[numbers]
        choices: list[int] = ids[:, 0].tolist()
        logits = self._dense.fill(ids, script.above[numbers])
        path = find_path(tree, emitted, choices, script.request)
        return VerifiedTree(tree, logits, choices, path, list(emitted), None)


def locate_nodes(tree: DraftTree, script: ReplayScript, root: int) -> tuple[list[int | None], list[int | None]]:
    """Return for every node its position in the text, or None, and its row, or None if it is unknown.

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
    """Fill missing rows below nodes with rows from similar contexts; return how many were filled."""
    estimated = 0
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if rows[node] is None and rows[parent] is not None and on_text[node] is None:
            rows[node] = script.likeness.nearest(tree.tokens[parent], tree.tokens[node], root)
            estimated += rows[node] is not None
    return estimated


def find_path(tree: DraftTree, emitted: Sequence[int], choices: Sequence[int], request: RecordedRequest) -> list[int]:
    """Find the accepted nodes. The engine accepts a block before it truncates at a stop token, so the path continues
    after the stop: along the target's choices, or along what was accepted when it was recorded."""
    is_choice = request.params.is_greedy and not request.params.has_penalties
    tokens, depths = (*emitted, *request.accepted_after_stop), tree.depths

    def token_after(node: int) -> int:
        if depths[node] >= len(emitted) and is_choice:
            return choices[node]
        return tokens[depths[node]] if depths[node] < len(tokens) else -1

    return list(walk(tree, token_after).path)


def _split_runs(known: npt.NDArray[np.bool_], longest: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of the runs of True, split to at most ``longest``."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(np.int8)))
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        for at in range(start, end, longest):
            yield at, min(at + longest, end)


def _rng(request: RecordedRequest) -> np.random.Generator:
    """Seed the drafter's random numbers as the engine does; without a seed every replay is the same."""
    key = (request.sample, DRAFTER_STREAM)
    return np.random.default_rng(np.random.SeedSequence(request.params.seed or 0, spawn_key=key))
