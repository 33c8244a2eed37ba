"""Figures of replays, and the two studies of scale: against the length of the context, and the number of trajectories.

A long context is synthetic: the texts of other recorded prompts, one behind another and round again where they do not
suffice, with the rows the target gave when each stood alone. It shows what long histories cost a drafter and whether
other texts in its tables lead it astray; it is no long document.
"""

from __future__ import annotations

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

CONTEXT_LIMIT = 1 << 20
MUCH = 0.5  # of the wrong guesses: where less is known, that is said


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayFigures:
    """One line of a result: one method, at one length of context or number of trajectories where these are studied."""

    method: str
    budget: int
    context: int | None = None  # tokens before the answer, at least
    trajectories: int | None = None  # the first so many samples of every prompt
    requests: int
    tokens: int
    cycles: int
    tau: float
    recorded_tau: float | None = None  # of the real run of this very method
    nodes: float  # of a tree, the root included
    coverage: float | None  # of the nodes beside the text: the share whose rows were recorded
    estimated: float | None = None  # and the share that got rows of contexts that end alike
    propose_ms: float  # medians over all cycles
    observe_ms: float
    cycle_ms: float  # both together
    read_ms: float  # to take in the prompt, its rows included; median over requests


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
        propose_ms=_ms([times.propose_seconds for times in timed]),
        observe_ms=_ms([times.observe_seconds for times in timed]),
        cycle_ms=_ms([sum(times) for times in timed]),
        read_ms=_ms([result.read_seconds for result in replays]),
    )


def study_contexts(
    recording: Recording,
    method: BenchMethod,
    lengths: Sequence[int],
    *,
    estimate: bool = False,
    progress: Progress | None = None,
) -> list[ReplayFigures]:
    """The same answers behind contexts of each length."""
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
    """Tau over the first 1, 4, ... samples of every prompt, drafted in turn with the method's memory."""
    check_trajectories(recording, counts)
    replays = replay(recording, method, estimate=estimate, progress=progress)
    return [
        compute_figures(
            recording, method, [result for result in replays if result.request.sample < count], trajectories=count
        )
        for count in counts
    ]


def check_contexts(recording: Recording, lengths: Sequence[int]) -> None:
    if not all(type(length) is int and 1 <= length <= CONTEXT_LIMIT for length in lengths):
        raise OptionError("A context has a length in tokens", got=lengths, allowed=f"1 to {CONTEXT_LIMIT}")
    if len({request.group[:2] for request in recording.requests}) < 2:
        raise OptionError(
            "A long context is made of other prompts' texts, and there are none", next_step="Record more prompts."
        )


def check_trajectories(recording: Recording, counts: Sequence[int]) -> None:
    samples = Counter(request.group for request in recording.requests)
    least = min(samples.values())
    if not all(type(count) is int and 1 <= count <= least for count in counts):
        raise OptionError(
            "Trajectories are recorded samples of every prompt",
            got=counts,
            allowed=f"1 to {least}",
            next_step="Record more: --samples 64 --temperature 0.6, for instance.",
        )


class ContextFiller:
    """Long contexts from the texts of other prompts."""

    def __init__(self, recording: Recording) -> None:
        check_contexts(recording, ())
        self._recording = recording
        self._texts: dict[int, TextRows] = {}

    def before(self, number: int, length: int) -> TextRows | None:
        """What stands before the prompt of request ``number`` to make it ``length`` tokens; None if it is as long.

        Another turn of its conversation repeats its words, another sample nearly does: neither is used.
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
            parts.append(_cut(self._text(other), missing))
            missing -= len(parts[-1].tokens)
        return _joined(parts) if parts else None

    def _text(self, number: int) -> TextRows:
        if number not in self._texts:
            request = self._recording.requests[number]
            self._texts[number] = ReplayScript(request, self._recording.target.vocab_size).part(len(request.text))
        return self._texts[number]


def format_figures(found: Sequence[ReplayFigures]) -> list[tuple[str, ...]]:
    """A table with a heading; a column stands there where one of the lines has something in it."""
    columns: list[tuple[str, Callable[[ReplayFigures], str]]] = [
        ("method", lambda line: line.method),
        ("budget", lambda line: str(line.budget)),
        ("context", lambda line: _text_of(line.context)),
        ("trajectories", lambda line: _text_of(line.trajectories)),
        ("tau", lambda line: f"{line.tau:.3f}"),
        ("recorded", lambda line: _text_of(line.recorded_tau, "{:.3f}")),
        ("nodes", lambda line: f"{line.nodes:.1f}"),
        ("known", lambda line: _text_of(line.coverage, "{:.0%}")),
        ("estimated", lambda line: _text_of(line.estimated, "{:.0%}")),
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
    """What should be said beside the table: which figures are not to be trusted."""
    thin = dict.fromkeys(
        line.method for line in found if line.coverage is not None and line.coverage + (line.estimated or 0.0) < MUCH
    )
    return [
        f"Less than half of the wrong guesses is known for {', '.join(thin)}: whoever learns from those (goose, "
        "recycling, ...) gets too low a tau and too short times. Record it too, or add --estimate."
    ] * bool(thin)


def _text_of(value: float | None, form: str = "{}") -> str:
    return "" if value is None else form.format(value)


def _recorded_tau(recording: Recording, method: BenchMethod) -> float | None:
    """Of the run in which this method was recorded, if it was and its texts are the ones that are replayed."""
    wanted = (method.drafter, method.options, method.memory, method.budget)
    for entry in recording.methods:
        own = (entry["drafter"], entry["options"], entry["memory"], entry["budget"])
        if own == wanted and not entry.get("left_out"):
            return round(float(entry["tokens"] / entry["cycles"]), 4)
    return None


def _cut(text: TextRows, length: int) -> TextRows:
    return TextRows(text.tokens[:length], text.ids[:length], text.above[:length], text.known[:length])


def _joined(texts: Sequence[TextRows]) -> TextRows:
    return TextRows(
        tuple(token for text in texts for token in text.tokens),
        np.concatenate([text.ids for text in texts]),
        np.concatenate([text.above for text in texts]),
        np.concatenate([text.known for text in texts]),
    )


def _ms(seconds: Sequence[float]) -> float:
    return round(1e3 * median(seconds), 4)
