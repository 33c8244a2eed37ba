"""What the commands do: a recording from a model's name to a file, and all methods over a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from draftwood.bench.records import Method
from draftwood.bench.replay.recorder import record
from draftwood.bench.replay.recording import DEFAULT_WIDTH, Recording, save_recording
from draftwood.bench.replay.replayer import check_method, replay
from draftwood.bench.replay.scale import (
    Figures,
    check_contexts,
    check_trajectories,
    context_study,
    figures_of,
    trajectory_study,
)
from draftwood.bench.tasks import Task
from draftwood.config import SamplingParams
from draftwood.disk import check_output
from draftwood.errors import OptionError
from draftwood.progress import Progress
from draftwood.targets import load_target


def record_to(
    path: Path,
    model: str,
    methods: Sequence[Method],
    tasks: Sequence[Task],
    params: SamplingParams,
    *,
    width: int = DEFAULT_WIDTH,
    dtype: str = "auto",
    quantize: str | None = None,
    device: str = "auto",
    target: str = "auto",
    force: bool = False,
    progress: Progress | None = None,
    note: Callable[[str], None] = print,
) -> Recording:
    """Runs the prompts with every method and writes the file; ``force`` replaces one that is there.

    Of a run that is interrupted it keeps what is whole, beside an older file and not in its place.
    """
    check_output(path, force=force)
    if width < 1:
        raise OptionError("Of a row some tokens are kept", got=f"width {width}", allowed="1 or more")
    loaded = load_target(
        model, dtype=dtype, quantize=quantize, device=device, target=target, max_batch=1, progress=progress
    )
    info = loaded.target.info
    recording = Recording(target=info, width=min(width, info.vocab_size))
    try:
        record(loaded.target, loaded.codec, methods, tasks, params, recording, progress)
    except BaseException:
        if recording.requests:
            place = path.with_name(f"partial-{path.name}") if path.exists() else path
            save_recording(place, recording)
            note(f"It ended early. {place} has what was recorded until then.")
        else:
            note("It ended early. Nothing was recorded.")
        raise
    save_recording(path, recording)
    return recording


def replay_methods(
    recording: Recording,
    methods: Sequence[Method],
    *,
    contexts: Sequence[int] = (),
    trajectories: Sequence[int] = (),
    estimate: bool = False,
    progress: Progress | None = None,
) -> list[Figures]:
    """The figures of every method: plainly, against the length of the context, or against the number of trajectories.

    Everything is checked before the first replay begins.
    """
    if contexts and trajectories:
        raise OptionError("One study at a time", got="context and trajectories", next_step="Give two commands.")
    for method in methods:
        check_method(recording, method)
    if contexts:
        check_contexts(recording, contexts)
    if trajectories:
        check_trajectories(recording, trajectories)

    def lines(method: Method) -> list[Figures]:
        if contexts:
            return context_study(recording, method, contexts, estimate=estimate, progress=progress)
        if trajectories:
            return trajectory_study(recording, method, trajectories, estimate=estimate, progress=progress)
        return [figures_of(recording, method, replay(recording, method, estimate=estimate, progress=progress))]

    return [line for method in methods for line in lines(method)]
