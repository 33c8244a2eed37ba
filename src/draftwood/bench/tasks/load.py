"""Loads the prompts of a benchmark by task: bundled with the package, from files, or from the hub.

A *task* is a named list of prompts. Its checksum covers the prompts, not the file, so that two runs can tell whether
they used the same prompts, whatever their source.
"""

import hashlib
import importlib.resources
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftwood.bench.tasks import hub
from draftwood.bench.tasks.formats import EXTENSIONS, file_stem, parse_lines, read_rows
from draftwood.bench.tasks.layouts import TaskPrompt, parse_prompts
from draftwood.errors import OptionError, PromptError, did_you_mean
from draftwood.progress import Progress, report

# File names of published data sets, without extension, in lower case with underscores. Any other file is a task named
# after the file; FOLDER/question and FOLDER/test are named after the folder.
ORIGINALS = {
    "aime24": ("aime24", "aime_2024", "aime_2024_problems", "aime24/test", "aime_2024/test"),
    "alpaca": ("alpaca", "alpaca_data", "alpaca/question"),
    "classeval": ("classeval", "classeval_data", "classeval/test"),
    "cnn_dm": ("cnn_dm", "cnn_dailymail", "sum/question", "cnn_dm/question", "cnn_dailymail/test"),
    "gsm8k": ("gsm8k", "gsm8k/test", "grade_school_math/data/test", "gsm8k/main/test", "gsm8k/question"),
    "humaneval": ("humaneval", "human_eval", "openai_humaneval", "humaneval/question", "humaneval/test"),
    "livecodebench": (
        "livecodebench",
        "code_generation_lite",
        "livecodebench/test",
        "livecodebench/test6",
        "code_generation_lite/test6",
    ),
    "mbpp": ("mbpp", "sanitized_mbpp", "mbpp/test", "mbpp/full/test", "mbpp/question"),
    "mt_bench": ("mt_bench", "mtbench", "mt_bench/question", "mtbench/question", "mt_bench_prompts/raw/question"),
    "qa": ("qa", "qa/question"),
    "spec_bench": ("spec_bench", "specbench", "spec_bench/question", "specbench/question"),
}
_GENERIC_NAMES = ("question", "questions", "test")  # named after their folder
_OTHER_SPLITS = ("train", "validation", "valid", "val", "dev", "test_socratic", "train_socratic")
_MAX_DEPTH = 5  # of subfolders to search

Loader = Callable[[], tuple[str, list[TaskPrompt]]]  # returns the source and the prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    name: str
    prompts: list[TaskPrompt]
    source: str
    sha256: str  # of the prompts' ids and turns


def load_tasks(
    names: Sequence[str], data: str | None, limit: int | None, progress: Progress | None = None
) -> list[Task]:
    """Load the tasks with these names, or all; the first ``limit`` prompts of each.

    ``data``: None for the bundled prompts, a folder, a file, ``hub``, or ``hub:ORG/NAME`` for any data set of the hub.
    """
    if limit is not None and limit < 1:
        raise OptionError("The limit on prompts is out of range", got=limit, allowed="1 or more")
    found, place = _find_loaders(data, progress)
    wanted = list(dict.fromkeys(names)) or sorted(found)
    for name in wanted:
        if name not in found:
            raise _unknown_task(name, found, place, data)
    tasks = []
    for done, name in enumerate(wanted):
        report(progress, "reading prompts", done, len(wanted))
        source, prompts = found[name]()
        tasks.append(_make_task(name, source, prompts, limit))
    report(progress, "reading prompts", len(wanted), len(wanted))
    return tasks


def checksum(prompts: Iterable[TaskPrompt]) -> str:
    """Hash the ids and turns of the prompts, in order."""
    content = [[prompt.id, list(prompt.turns)] for prompt in prompts]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode("ascii")).hexdigest()


def _make_task(name: str, source: str, prompts: list[TaskPrompt], limit: int | None) -> Task:
    if not prompts:
        raise PromptError(f"The task {name} has no prompts", got=source, allowed="one prompt per line")
    chosen = prompts[:limit]
    return Task(name=name, prompts=chosen, source=source, sha256=checksum(chosen))


def _find_loaders(data: str | None, progress: Progress | None) -> tuple[dict[str, Loader], str]:
    """Return a loader for each available task, and a description of the source."""
    if data is None:
        return _bundled_loaders(), "the bundled prompts"
    if data == hub.HUB or data.startswith(f"{hub.HUB}:"):
        return hub.make_loaders(data, progress), "the hub"
    path = Path(data)
    if path.is_dir():
        files = find_files(path)
        if not files:
            raise PromptError(
                "The folder contains no prompt files",
                got=data,
                allowed=[f"TASK{extension}" for extension in EXTENSIONS],
            )
        return {name: _file_loader(name, file) for name, file in files.items()}, data
    if not path.is_file():
        raise OptionError(
            "No prompts found",
            got=data,
            allowed="a folder, a file, hub, or hub:ORG/NAME",
            next_step="Without --data the bundled prompts are used.",
        )
    if not file_stem(path):
        raise PromptError("The file is not a prompt file", got=data, allowed=[f"TASK{e}" for e in EXTENSIONS])
    name = find_known_task(path) or file_stem(path)
    return {name: _file_loader(name, path)}, data


def _bundled_loaders() -> dict[str, Loader]:
    folder = importlib.resources.files("draftwood.bench.tasks").joinpath("prompts")

    def loader(name: str, file_name: str) -> Loader:
        def load() -> tuple[str, list[TaskPrompt]]:
            text = folder.joinpath(file_name).read_text(encoding="utf-8")
            source = f"draftwood/bench/prompts/{file_name}"
            return source, parse_prompts(parse_lines(text.split("\n"), source), name)

        return load

    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".jsonl"))
    return {file_stem(name): loader(file_stem(name), name) for name in names}


def _file_loader(name: str, path: Path) -> Loader:
    return lambda: (str(path), parse_prompts(read_rows(path), name))


# Files


def find_files(folder: Path) -> dict[str, Path]:
    """Find the prompt files of a folder by task. If a task has several, prefer the highest in the tree, then the
    order of names in ``ORIGINALS``, then the order of ``EXTENSIONS``."""
    best: dict[str, tuple[tuple[int, int, int, str], Path]] = {}
    for depth, path in _walk_files(folder):
        name = find_known_task(path) or (_name_from_file(path) if depth == 0 else _name_from_folder(path))
        if name:
            rank = (depth, _rank_of_name(name, path), _rank_of_extension(path), path.name)
            if name not in best or rank < best[name][0]:
                best[name] = rank, path
    return {name: path for name, (_, path) in sorted(best.items())}


def find_known_task(path: Path) -> str | None:
    """Return the task of a file with a known name."""
    return next((task for task, names in ORIGINALS.items() if any(_path_ends_with(path, name) for name in names)), None)


def _name_from_file(path: Path) -> str | None:
    stem = file_stem(path)
    if stem.lower() in _OTHER_SPLITS:
        return None
    return _name_from_folder(path) or stem


def _name_from_folder(path: Path) -> str | None:
    return path.absolute().parent.name if file_stem(path).lower() in _GENERIC_NAMES else None


def _path_ends_with(path: Path, name: str) -> bool:
    """Whether the path ends with ``name``, which may include folders."""
    parts = name.split("/")
    own = [*path.absolute().parent.parts, _unsharded_stem(path)][-len(parts) :]
    return [part.lower().replace("-", "_") for part in own] == parts


def _unsharded_stem(path: Path) -> str:
    """Return the stem without a shard number, as in test-00000-of-00001."""
    return hub.SHARD.sub("", file_stem(path))


def _rank_of_name(task: str, path: Path) -> int:
    names = ORIGINALS.get(task, ())
    return next((rank for rank, name in enumerate(names) if _path_ends_with(path, name)), len(names))


def _rank_of_extension(path: Path) -> int:
    return EXTENSIONS.index(path.name.lower()[len(file_stem(path)) :])


def _walk_files(folder: Path) -> Iterable[tuple[int, Path]]:
    """Yield prompt files with their depth below the folder; hidden files are skipped."""
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and depth < _MAX_DEPTH)
        for name in sorted(names):
            if not name.startswith(".") and file_stem(name):
                yield depth, Path(place, name)


def _unknown_task(name: str, found: Mapping[str, object], place: str, data: str | None) -> OptionError:
    step = did_you_mean(name.lower().replace("-", "_"), found)
    if name in ORIGINALS and data is None:
        step = "This data set is not bundled: add --data FOLDER or --data hub."
    elif name in ORIGINALS and data == hub.HUB:
        step = "This data set is not on the hub: download it from its repository and add --data FOLDER."
    return OptionError(f"Unknown task in {place}", got=name, allowed=sorted(found), next_step=step)
