"""Figures of replays, and two studies: by context length and by number of trajectories.

A long context is synthetic: the texts of other recorded prompts, concatenated and repeated as needed, with the rows
that the target produced for each text alone. It measures what a long history costs a drafter, and whether unrelated
text in its tables reduces acceptance. It is not a long document.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import median

import numpy as np

from draftwood.bench.records import BenchMethod
from draftwood.bench.replay.recording import Recording
from draftwood.bench.replay.replayer import ReplayResult, ReplayScript, TextRows, check_method, replay
from draftwood.errors import OptionError
from draftwood.progress import Progress

MAX_CONTEXT = 1 << 20
MIN_COVERAGE = 0.5  # share of known rejected nodes below which a warning is shown


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayFigures:
    """Figures of one method, at one context length or number of trajectories if studied."""

    method: str
    budget: int
    context: int | None = None  # minimum prompt tokens
    trajectories: int | None = None  # number of samples per prompt
    requests: int
    tokens: int
    cycles: int
    tau: float
    recorded_tau: float | None = None  # of the recorded run of the same method
    nodes: float  # mean tree size, root included
    coverage: float | None  # share of off-text nodes with recorded rows
    estimated: float | None = None  # share of off-text nodes with rows of similar contexts
    propose_ms: float  # medians over all cycles
    observe_ms: float
    cycle_ms: float  # propose and observe
    read_ms: float  # for the prompt and its rows; median over requests


def compute_figures(
    recording: Recording,
    method: BenchMethod,
    replays: Sequence[ReplayResult],
    *,
    context: int | None = None,
    trajectories: int | None = None,
) -> ReplayFigures:
    tokens = sum(result.stats.output_tokens for result in replays)
    cycles = sum(result.stats.cycles for result in replays)
    off_text = sum(result.off_text for result in replays)
    estimated = sum(result.off_text_estimated for result in replays)
    timed = [times for result in replays for times in result.cycles]
    whole = context is None and trajectories is None
    return ReplayFigures(
        method=method.label,
        budget=int(method.budget),
        context=context,
        trajectories=trajectories,
        requests=len(replays),
        tokens=tokens,
        cycles=cycles,
        tau=round(tokens / cycles, 4),
        recorded_tau=_recorded_tau(recording, method) if whole else None,
        nodes=round(sum(result.stats.drafted_nodes for result in replays) / cycles + 1.0, 2),
        coverage=round(sum(result.off_text_known for result in replays) / off_text, 4) if off_text else None,
        estimated=round(estimated / off_text, 4) if estimated else None,
        propose_ms=_median_ms([times.propose_seconds for times in timed]),
        observe_ms=_median_ms([times.observe_seconds for times in timed]),
        cycle_ms=_median_ms([sum(times) for times in timed]),
        read_ms=_median_ms([result.read_seconds for result in replays]),
    )


def study_contexts(
    recording: Recording,
    method: BenchMethod,
    lengths: Sequence[int],
    *,
    estimate: bool = False,
    progress: Progress | None = None,
) -> list[ReplayFigures]:
    """Replay the same outputs after contexts of each length."""
    check_method(recording, method)
    filler = ContextFiller(recording)
    found = []
    for length in lengths:
        before = partial(filler.before, length=length)
        replays = replay(recording, method, estimate=estimate, before=before, progress=progress)
        found.append(compute_figures(recording, method, replays, context=length))
    return found


def study_trajectories(
    recording: Recording,
    method: BenchMethod,
    counts: Sequence[int],
    *,
    estimate: bool = False,
    progress: Progress | None = None,
) -> list[ReplayFigures]:
    """Compute tau over the first 1, 4, ... samples of every prompt, replayed in sequence with the method's memory."""
    check_trajectories(recording, counts)
    replays = replay(recording, method, estimate=estimate, progress=progress)
    return [
        compute_figures(
            recording, method, [result for result in replays if result.request.sample < count], trajectories=count
        )
        for count in counts
    ]


def check_contexts(recording: Recording, lengths: Sequence[int]) -> None:
    if not all(type(length) is int and 1 <= length <= MAX_CONTEXT for length in lengths):
        raise OptionError("A context length must be a number of tokens", got=lengths, allowed=f"1 to {MAX_CONTEXT}")
    if len({request.group[:2] for request in recording.requests}) < 2:
        raise OptionError(
            "A long context is built from other prompts, and the recording has only one",
            next_step="Record more prompts.",
        )


def check_trajectories(recording: Recording, counts: Sequence[int]) -> None:
    samples = Counter(request.group for request in recording.requests)
    fewest = min(samples.values())
    if not all(type(count) is int and 1 <= count <= fewest for count in counts):
        raise OptionError(
            "Trajectories must be at most the recorded samples per prompt",
            got=counts,
            allowed=f"1 to {fewest}",
            next_step="Record more samples, for example: --samples 64 --temperature 0.6",
        )


class ContextFiller:
    """Builds long contexts from the texts of other prompts."""

    def __init__(self, recording: Recording) -> None:
        check_contexts(recording, ())
        self._recording = recording
        self._texts: dict[int, TextRows] = {}

    def before(self, number: int, length: int) -> TextRows | None:
        """Return the text that extends the prompt of request ``number`` to ``length`` tokens; None if not needed.

        Other turns and samples of the same prompt are excluded, since they repeat its words.
        """
        requests = self._recording.requests
        own = requests[number]
        missing = length - len(own.prompt_ids)
        order = [*range(number + 1, len(requests)), *range(number)]
        others = [n for n in order if requests[n].sample == 0 and requests[n].group[:2] != own.group[:2]]
        parts: list[TextRows] = []
        for other in cycle(others):
            if missing <= 0:
                break
            parts.append(_cut(self._load_text(other), missing))
            missing -= len(parts[-1].tokens)
        return _join(parts) if parts else None

    def _load_text(self, number: int) -> TextRows:
        if number not in self._texts:
            request = self._recording.requests[number]
            self._texts[number] = ReplayScript(request, self._recording.target.vocab_size).slice(len(request.text))
        return self._texts[number]


def format_figures(found: Sequence[ReplayFigures]) -> list[tuple[str, ...]]:
    """Format a table with a header; empty columns are omitted."""
    columns: list[tuple[str, Callable[[ReplayFigures], str]]] = [
        ("method", lambda line: line.method),
        ("budget", lambda line: str(line.budget)),
        ("context", lambda line: _format_value(line.context)),
        ("trajectories", lambda line: _format_value(line.trajectories)),
        ("tau", lambda line: f"{line.tau:.3f}"),
        ("recorded", lambda line: _format_value(line.recorded_tau, "{:.3f}")),
        ("nodes", lambda line: f"{line.nodes:.1f}"),
        ("known", lambda line: _format_value(line.coverage, "{:.0%}")),
        ("estimated", lambda line: _format_value(line.estimated, "{:.0%}")),
        ("propose ms", lambda line: f"{line.propose_ms:.3f}"),
        ("observe ms", lambda line: f"{line.observe_ms:.3f}"),
        ("prompt ms", lambda line: f"{line.read_ms:.1f}"),
        ("cycles", lambda line: str(line.cycles)),
        ("tokens", lambda line: str(line.tokens)),
    ]
    filled = [(name, [text(line) for line in found]) for name, text in columns]
    shown = [(name, cells) for name, cells in filled if any(cells)]
    return [tuple(name for name, _ in shown), *zip(*(cells for _, cells in shown), strict=True)]


def list_warnings(found: Sequence[ReplayFigures]) -> list[str]:
    """List warnings on unreliable figures."""
    thin = dict.fromkeys(
        line.method
        for line in found
        if line.coverage is not None and line.coverage + (line.estimated or 0.0) < MIN_COVERAGE
    )
    return [
        f"Less than half of the rejected nodes were recorded for {', '.join(thin)}: for drafters that learn from them "
        "(goose, recycling, ...) tau and times are too low. Record this method too, or add --estimate."
    ] * bool(thin)


def _format_value(value: float | None, form: str = "{}") -> str:
    return "" if value is None else form.format(value)


def _recorded_tau(recording: Recording, method: BenchMethod) -> float | None:
    """Return tau of the recorded run of this method, if its texts are the ones replayed."""
    wanted = (method.drafter, method.options, method.memory, method.budget)
    for entry in recording.methods:
        own = (entry["drafter"], entry["options"], entry["memory"], entry["budget"])
        if own == wanted and not entry.get("left_out"):
            return round(float(entry["tokens"] / entry["cycles"]), 4)
    return None


def _cut(text: TextRows, length: int) -> TextRows:
    return TextRows(text.tokens[:length], text.ids[:length], text.above[:length], text.known[:length])


def _join(texts: Sequence[TextRows]) -> TextRows:
    return TextRows(
        tuple(token for text in texts for token in text.tokens),
        np.concatenate([text.ids for text in texts]),
        np.concatenate([text.above for text in texts]),
        np.concatenate([text.known for text in texts]),
    )


def _median_ms(seconds: Sequence[float]) -> float:
    return round(1e3 * median(seconds), 4)
