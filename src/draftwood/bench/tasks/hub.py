"""Downloads prompts of public data sets from the Hugging Face hub into the hub library's cache.

Only prompt files are downloaded; code of a data set is never run. ``hub`` means the data sets in ``SETS``;
``hub:ORG/NAME``, ``hub:ORG/NAME@REVISION`` and ``hub:ORG/NAME/FILE`` any other whose rows have a known layout.
"""

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
_SPLITS = ("test", "validation", "train")  # the first available split is used


@dataclass(frozen=True, kw_only=True, slots=True)
class HubDataset:
    """A data set of the hub and its prompt file."""

    repo: str
    files: str | None = None  # a pattern; None: the test split, if it is unambiguous
    revision: str | None = None


SETS = {
    "aime24": HubDataset(repo="HuggingFaceH4/aime_2024", files="data/train-*.parquet"),  # its only split
    "alpaca": HubDataset(repo="tatsu-lab/alpaca", files="data/train-*.parquet"),  # its only split
    "classeval": HubDataset(repo="FudanSELab/ClassEval", files="data/test-*.parquet"),
    "cnn_dm": HubDataset(repo="abisee/cnn_dailymail", files="3.0.0/test-*.parquet"),
    "gsm8k": HubDataset(repo="openai/gsm8k", files="main/test-*.parquet"),
    "humaneval": HubDataset(repo="openai/openai_humaneval", files="openai_humaneval/test-*.parquet"),
    # Each release adds a file; this is the sixth. Earlier files are several times larger.
    "livecodebench": HubDataset(repo="livecodebench/code_generation_lite", files="test6.jsonl"),
    "mbpp": HubDataset(repo="google-research-datasets/mbpp", files="full/test-*.parquet"),
    "mt_bench": HubDataset(repo="HuggingFaceH4/mt_bench_prompts", files="raw/question.jsonl"),
}


def make_loaders(data: str, progress: Progress | None) -> dict[str, Callable[[], tuple[str, list[TaskPrompt]]]]:
    """Return a loader for each task of ``data``; nothing is downloaded until it is called."""
    sets = SETS if data == HUB else dict([parse_hub_name(data)])

    def loader(name: str, dataset: HubDataset) -> Callable[[], tuple[str, list[TaskPrompt]]]:
        return lambda: _load(name, dataset, progress)

    return {name: loader(name, dataset) for name, dataset in sets.items()}


def parse_hub_name(data: str) -> tuple[str, HubDataset]:
    """Parse ``hub:ORG/NAME[@REVISION][/FILE]`` into task and data set."""
    match = re.fullmatch(rf"{HUB}:([\w.-]+)/([\w.-]+)(?:@([^/]+))?(?:/(.+))?", data)
    if match is None:
        raise OptionError(
            "Not a valid hub data set name",
            got=data,
            allowed=["hub", "hub:ORG/NAME", "hub:ORG/NAME@REVISION", "hub:ORG/NAME/FILE"],
        )
    owner, name, revision, files = match.groups()
    repo = f"{owner}/{name}"
    for task, known in SETS.items():
        if known.repo.lower() == repo.lower():
            return task, HubDataset(repo=repo, files=files or known.files, revision=revision)
    return name, HubDataset(repo=repo, files=files, revision=revision)


def _load(task: str, dataset: HubDataset, progress: Progress | None) -> tuple[str, list[TaskPrompt]]:
    if not hub_is_installed():
        raise MissingExtraError(f"Fetching {dataset.repo} from the hub", "huggingface_hub", "hub")
    paths = list(_find_cached(dataset) if hub_is_off() else _download(dataset, progress))
    name, path = paths[0]
    commit = path.parents[name.count("/")].name  # the cache has one folder per commit
    source = f"{HUB}:{dataset.repo}@{commit}/{name}"

    def rows() -> Iterator[tuple[str, Row]]:
        for name, path in paths:
            yield from read_rows(path, f"{dataset.repo}/{name}")  # the cache's own paths are long

    return source, parse_prompts(rows(), task)


def _download(dataset: HubDataset, progress: Progress | None) -> Iterator[tuple[str, Path]]:
    import huggingface_hub

    with _hub_errors(dataset):
        info = huggingface_hub.HfApi().dataset_info(dataset.repo, revision=dataset.revision, timeout=HUB_TIMEOUT)
    names = choose_files(dataset, [str(file.rfilename) for file in info.siblings or []])
    for done, name in enumerate(names):
        report(progress, f"downloading {dataset.repo}", done, len(names))
        with _hub_errors(dataset):
            path = huggingface_hub.hf_hub_download(
                dataset.repo, name, repo_type="dataset", revision=dataset.revision, etag_timeout=HUB_TIMEOUT
            )
        yield name, Path(path)
    report(progress, f"downloading {dataset.repo}", len(names), len(names))


def _find_cached(dataset: HubDataset) -> Iterator[tuple[str, Path]]:
    """Find the files in the cache, without network access."""
    import huggingface_hub

    with _hub_errors(dataset):
        folder = Path(
            huggingface_hub.snapshot_download(
                dataset.repo, repo_type="dataset", revision=dataset.revision, local_files_only=True
            )
        )
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    yield from ((name, folder / name) for name in choose_files(dataset, names))


def choose_files(dataset: HubDataset, names: Sequence[str]) -> list[str]:
    """Choose the files that match the pattern, else those of the test split, with all shards of a table."""
    data = sorted(name for name in names if file_stem(name))
    if dataset.files is not None:
        chosen = [name for name in data if fnmatchcase(name, dataset.files)]
    else:
        chosen = next((fitting for split in _SPLITS if (fitting := [n for n in data if _is_split(n, split)])), data)
    tables = sorted({_table_name(name) for name in chosen})
    if not chosen:
        raise DraftwoodError(
            f"{dataset.repo} has no matching prompt file",
            got=dataset.files or "no .jsonl, .json or .parquet file",
            allowed=data or None,
            next_step="Name a file, as in hub:ORG/NAME/FILE, or use a local folder.",
        )
    if len(tables) > 1 and dataset.files is None:
        raise DraftwoodError(
            f"{dataset.repo} has several prompt files",
            got=", ".join(chosen),
            next_step=f"Choose one, as in hub:{dataset.repo}/{chosen[0]}.",
        )
    return chosen


def _is_split(name: str, split: str) -> bool:
    """Whether the file name, or a folder of its path, is that of a split."""
    parts = [part.lower() for part in _table_name(name).split("/")]
    return any(re.split(r"[-_.]", part)[0] == split for part in parts)


def _table_name(name: str) -> str:
    """Return the name without extension and shard number."""
    folder, slash, _ = name.rpartition("/")
    return f"{folder}{slash}{SHARD.sub('', file_stem(name))}"


def _hub_errors(dataset: HubDataset) -> AbstractContextManager[None]:
    return hub_errors(f"The data set {dataset.repo}", "a local folder with --data", DraftwoodError)
