"""Prompts of public sets from the Hugging Face hub, into the hub library's own cache.

Only files of prompts are fetched, and no code of a data set is run. ``hub`` stands for the sets in the table below;
``hub:ORG/NAME``, ``hub:ORG/NAME@REVISION`` and ``hub:ORG/NAME/FILE`` for any other whose rows have a known layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from draftwood.bench.tasks.formats import file_stem, read_rows
from draftwood.bench.tasks.layouts import Row, TaskPrompt, parse_prompts
from draftwood.errors import DraftwoodError, MissingExtraError, OptionError
from draftwood.models import HUB_TIMEOUT, hub_errors, hub_is_installed, hub_is_off
from draftwood.progress import Progress, report

HUB = "hub"
SHARD = re.compile(r"-\d{5}-of-\d{5}(-[0-9a-f]+)?$")  # at the end of a stem
_SPLITS = ("test", "validation", "train")  # the first there is is taken


@dataclass(frozen=True, kw_only=True, slots=True)
class HubDataset:
    """One data set: where it is and which of its files has the prompts."""

    repo: str
    files: str | None = None  # a pattern; None: the test split, if there is just one
    revision: str | None = None


SETS = {
    "aime24": HubDataset(repo="HuggingFaceH4/aime_2024", files="data/train-*.parquet"),  # it has no other split
    "alpaca": HubDataset(repo="tatsu-lab/alpaca", files="data/train-*.parquet"),  # it has no other split
    "classeval": HubDataset(repo="FudanSELab/ClassEval", files="data/test-*.parquet"),
    "cnn_dm": HubDataset(repo="abisee/cnn_dailymail", files="3.0.0/test-*.parquet"),
    "gsm8k": HubDataset(repo="openai/gsm8k", files="main/test-*.parquet"),
    "humaneval": HubDataset(repo="openai/openai_humaneval", files="openai_humaneval/test-*.parquet"),
    # Each release adds a file; this is what the sixth added. The files before it are several times as large.
    "livecodebench": HubDataset(repo="livecodebench/code_generation_lite", files="test6.jsonl"),
    "mbpp": HubDataset(repo="google-research-datasets/mbpp", files="full/test-*.parquet"),
    "mt_bench": HubDataset(repo="HuggingFaceH4/mt_bench_prompts", files="raw/question.jsonl"),
}


def make_loaders(data: str, progress: Progress | None) -> dict[str, Callable[[], tuple[str, list[TaskPrompt]]]]:
    """How to load each task that ``data`` stands for; nothing is fetched before that."""
    sets = SETS if data == HUB else dict([parse_hub_name(data)])

    def loader(name: str, found: HubDataset) -> Callable[[], tuple[str, list[TaskPrompt]]]:
        return lambda: _load(name, found, progress)

    return {name: loader(name, found) for name, found in sets.items()}


def parse_hub_name(data: str) -> tuple[str, HubDataset]:
    """The task and the data set of ``hub:ORG/NAME[@REVISION][/FILE]``."""
    match = re.fullmatch(rf"{HUB}:([\w.-]+)/([\w.-]+)(?:@([^/]+))?(?:/(.+))?", data)
    if match is None:
        raise OptionError(
            "That names no data set of the hub",
            got=data,
            allowed=["hub", "hub:ORG/NAME", "hub:ORG/NAME@REVISION", "hub:ORG/NAME/FILE"],
        )
    owner, name, revision, files = match.groups()
    repo = f"{owner}/{name}"
    for task, known in SETS.items():
        if known.repo.lower() == repo.lower():
            return task, HubDataset(repo=repo, files=files or known.files, revision=revision)
    return name, HubDataset(repo=repo, files=files, revision=revision)


def _load(task: str, found: HubDataset, progress: Progress | None) -> tuple[str, list[TaskPrompt]]:
    if not hub_is_installed():
        raise MissingExtraError(f"Fetching {found.repo} from the hub", "huggingface_hub", "hub")
    paths = list(_cached(found) if hub_is_off() else _fetched(found, progress))
    name, path = paths[0]
    commit = path.parents[name.count("/")].name  # the cache has a folder for each
    source = f"{HUB}:{found.repo}@{commit}/{name}"

    def rows() -> Iterator[tuple[str, Row]]:
        for name, path in paths:
            yield from read_rows(path, f"{found.repo}/{name}")  # named as the hub does: the cache's own paths are long

    return source, parse_prompts(rows(), task)


def _fetched(found: HubDataset, progress: Progress | None) -> Iterator[tuple[str, Path]]:
    import huggingface_hub

    with _hub_errors(found):
        info = huggingface_hub.HfApi().dataset_info(found.repo, revision=found.revision, timeout=HUB_TIMEOUT)
    names = choose_files(found, [str(file.rfilename) for file in info.siblings or []])
    for done, name in enumerate(names):
        report(progress, f"downloading {found.repo}", done, len(names))
        with _hub_errors(found):
            path = huggingface_hub.hf_hub_download(
                found.repo, name, repo_type="dataset", revision=found.revision, etag_timeout=HUB_TIMEOUT
            )
        yield name, Path(path)
    report(progress, f"downloading {found.repo}", len(names), len(names))


def _cached(found: HubDataset) -> Iterator[tuple[str, Path]]:
    """The same files from the cache alone, for those who want no talk with the hub."""
    import huggingface_hub

    with _hub_errors(found):
        folder = Path(
            huggingface_hub.snapshot_download(
                found.repo, repo_type="dataset", revision=found.revision, local_files_only=True
            )
        )
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    yield from ((name, folder / name) for name in choose_files(found, names))


def choose_files(found: HubDataset, names: Sequence[str]) -> list[str]:
    """The files to read: those that fit the pattern, else those of the test split. Shards of one table go together."""
    data = sorted(name for name in names if file_stem(name))
    if found.files is not None:
        chosen = [name for name in data if fnmatchcase(name, found.files)]
    else:
        chosen = next((fitting for split in _SPLITS if (fitting := [n for n in data if _is_split(n, split)])), data)
    tables = sorted({_table(name) for name in chosen})
    if not chosen:
        raise DraftwoodError(
            f"{found.repo} has no such file of prompts",
            got=found.files or "no .jsonl, .json or .parquet at all",
            allowed=data or None,
            next_step="Name a file, as in hub:ORG/NAME/FILE, or give a local folder.",
        )
    if len(tables) > 1 and found.files is None:
        raise DraftwoodError(
            f"{found.repo} has several files of prompts",
            got=", ".join(chosen),
            next_step=f"Name the one you want, as in hub:{found.repo}/{chosen[0]}.",
        )
    return chosen


def _is_split(name: str, split: str) -> bool:
    """Whether a file's name, or a folder on its way, is that of a split."""
    parts = [part.lower() for part in _table(name).split("/")]
    return any(re.split(r"[-_.]", part)[0] == split for part in parts)


def _table(name: str) -> str:
    """The name without extension and number of the shard."""
    folder, slash, _ = name.rpartition("/")
    return f"{folder}{slash}{SHARD.sub('', file_stem(name))}"


def _hub_errors(found: HubDataset) -> AbstractContextManager[None]:
    return hub_errors(f"The data set {found.repo}", "a local folder with --data", DraftwoodError)
