"""The work of ``bench record`` and ``bench replay``: record to a file, replay methods."""

from collections.abc import Callable, Sequence
from pathlib import Path

from draftwood.bench.records import BenchMethod
from draftwood.bench.replay.recorder import check_batch, record
from draftwood.bench.replay.recording import DEFAULT_WIDTH, Recording, save_recording
from draftwood.bench.replay.replayer import check_method, replay
from draftwood.bench.replay.studies import (
    ReplayFigures,
    check_contexts,
    check_trajectories,
    compute_figures,
    study_contexts,
    study_trajectories,
)
from draftwood.bench.tasks import Task
from draftwood.config import ModelOptions, SamplingParams
from draftwood.disk import check_output
from draftwood.errors import OptionError
from draftwood.progress import Progress
from draftwood.targets import load_target


def record_to(
    path: Path,
    model: ModelOptions,
    methods: Sequence[BenchMethod],
    tasks: Sequence[Task],
    params: SamplingParams,
    *,
    width: int = DEFAULT_WIDTH,
    batch: int = 1,
    force: bool = False,
    progress: Progress | None = None,
    note: Callable[[str], None] = print,
) -> Recording:
    """Record every method on the prompts and write the file; ``force`` replaces an existing file.

    An interrupted recording keeps its complete requests, in a separate file if there is an older one.
    """
    check_output(path, force=force)
    check_batch(methods, batch)  # before the model is loaded
    if width < 1:
        raise OptionError("The width must be positive", got=f"width {width}", allowed="1 or more")
    loaded = load_target(model, progress)
    info = loaded.target.info
    recording = Recording(target=info, width=min(width, info.vocab_size))
    try:
        record(loaded.target, loaded.codec, methods, tasks, params, recording, progress, batch)
    except BaseException:
        if recording.requests:
            place = path.with_name(f"partial-{path.name}") if path.exists() else path
            save_recording(place, recording)
            note(f"The recording was interrupted. {place} holds the requests recorded so far.")
        else:
            note("The recording was interrupted. Nothing was recorded.")
        raise
    save_recording(path, recording)
    return recording


def replay_methods(
    recording: Recording,
    methods: Sequence[BenchMethod],
    *,
    contexts: Sequence[int] = (),
    trajectories: Sequence[int] = (),
    estimate: bool = False,
    progress: Progress | None = None,
) -> list[ReplayFigures]:
    """Compute the figures of every method: plain, by context length, or by number of trajectories.

    All arguments are checked before the first replay.
    """
    if contexts and trajectories:
        raise OptionError("Only one study at a time", got="context and trajectories", next_step="Run two commands.")
    for method in methods:
        check_method(recording, method)
    if contexts:
        check_contexts(recording, contexts)
    if trajectories:
        check_trajectories(recording, trajectories)

    def replay_method(method: BenchMethod) -> list[ReplayFigures]:
        if contexts:
            return study_contexts(recording, method, contexts, estimate=estimate, progress=progress)
        if trajectories:
            return study_trajectories(recording, method, trajectories, estimate=estimate, progress=progress)
        return [compute_figures(recording, method, replay(recording, method, estimate=estimate, progress=progress))]

    return [line for method in methods for line in replay_method(method)]
