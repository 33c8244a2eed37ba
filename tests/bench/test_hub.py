"""Prompts from the hub, with a fake hub: no network access."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwood.bench.tasks.hub import SETS, HubDataset, choose_files, parse_hub_name
from draftwood.bench.tasks.load import ORIGINALS, load_tasks
from draftwood.errors import DraftwoodError, MissingExtraError, OptionError, PromptError

COMMIT = "0123abc"


class FakeHub:
    """Datasets as files by name, in a cache with the layout of the real one."""

    def __init__(self, folder: Path, fails: Exception | None = None) -> None:
        self.folder, self.fails = folder, fails
        self.asked: list[str] = []
        self.fetched: list[tuple[str, str, str | None]] = []
        self.files: dict[str, dict[str, str]] = {}

    def HfApi(self) -> SimpleNamespace:  # noqa: N802 - the library's name
        return SimpleNamespace(dataset_info=self.dataset_info)

    def dataset_info(self, repo: str, *, revision: str | None, timeout: float) -> SimpleNamespace:
        if self.fails:
            raise self.fails
        self.asked.append(repo)
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files[repo]])

    def snapshot(self, repo: str) -> Path:
        return self.folder / f"datasets--{repo.replace('/', '--')}" / "snapshots" / COMMIT

    def hf_hub_download(
        self, repo: str, name: str, *, repo_type: str, revision: str | None, etag_timeout: float
    ) -> str:
        assert repo_type == "dataset"
        self.fetched.append((repo, name, revision))
        path = self.snapshot(repo) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.files[repo][name], encoding="utf-8")
        return str(path)

    def snapshot_download(self, repo: str, *, repo_type: str, revision: str | None, local_files_only: bool) -> str:
        assert local_files_only
        if not self.snapshot(repo).exists():
            raise FileNotFoundError("not in the cache")
        return str(self.snapshot(repo))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "snapshots" / "cache")  # a name that also occurs in the folders of the cache
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)  # type: ignore[arg-type]
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("DRAFTWOOD_OFFLINE", raising=False)
    return fake


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


MT_BENCH = lines({"question_id": 81, "category": "writing", "prompt": ["Write.", "Rewrite."], "reference": []})


def test_known_dataset(hub: FakeHub) -> None:
    hub.files["HuggingFaceH4/mt_bench_prompts"] = {
        "README.md": "",
        "raw/question.jsonl": MT_BENCH,
        "data/x.parquet": "",
    }
    seen: list[tuple[str, int, int]] = []
    (task,) = load_tasks(["mt_bench"], "hub", None, lambda *step: seen.append(step))
    assert task.name == "mt_bench"
    assert [(prompt.id, prompt.turns, prompt.category) for prompt in task.prompts] == [
        ("mt_bench/81", ("Write.", "Rewrite."), "writing")
    ]
    assert task.source == f"hub:HuggingFaceH4/mt_bench_prompts@{COMMIT}/raw/question.jsonl"
    assert hub.fetched == [("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl", None)]
    assert ("downloading HuggingFaceH4/mt_bench_prompts", 1, 1) in seen


def test_only_requested_datasets_are_fetched(hub: FakeHub) -> None:
    hub.files["livecodebench/code_generation_lite"] = {
        f"test{n}.jsonl": lines({"question_id": f"q{n}", "question_content": "Add.", "starter_code": ""}) for n in "56"
    }
    hub.files["HuggingFaceH4/mt_bench_prompts"] = {"raw/question.jsonl": MT_BENCH}
    tasks = load_tasks(["livecodebench", "mt_bench"], "hub", 1)
    assert [task.prompts[0].id for task in tasks] == ["q6", "mt_bench/81"]
    assert [name for _, name, _ in hub.fetched] == ["test6.jsonl", "raw/question.jsonl"]


def test_known_dataset_in_parquet(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = hub.snapshot("openai/gsm8k") / "main" / "test-00000-of-00001.parquet"
    path.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist([{"question": "How many?", "answer": "#### 4"}]), path)
    monkeypatch.setenv("DRAFTWOOD_OFFLINE", "1")
    (task,) = load_tasks(["gsm8k"], "hub", None)
    assert [(prompt.id, prompt.turns) for prompt in task.prompts] == [("gsm8k/0", ("How many?",))]


def test_every_dataset_in_the_table_is_a_known_task() -> None:
    assert set(SETS) <= set(ORIGINALS)
    assert set(ORIGINALS) - set(SETS) == {"qa", "spec_bench"}  # on GitHub only


def test_dataset_missing_on_hub(hub: FakeHub) -> None:
    with pytest.raises(
        OptionError, match=r"Unknown task in the hub\n  got: spec_bench\n  allowed: aime24, .*\n.*not on the hub"
    ):
        load_tasks(["gsm8k", "spec_bench"], "hub", None)
    with pytest.raises(OptionError, match="Did you mean 'gsm8k'"):
        load_tasks(["gsm8"], "hub", None)
    assert hub.asked == []  # before anything is fetched


# Any other dataset


@pytest.mark.parametrize(
    ("data", "task", "expected"),
    [
        ("hub:org/my-set", "my-set", HubDataset(repo="org/my-set")),
        ("hub:org/set@v1.0", "set", HubDataset(repo="org/set", revision="v1.0")),
        ("hub:org/set/sub/test.jsonl", "set", HubDataset(repo="org/set", files="sub/test.jsonl")),
        ("hub:org/set@abc/d/*.json", "set", HubDataset(repo="org/set", files="d/*.json", revision="abc")),
        ("hub:openai/gsm8k", "gsm8k", HubDataset(repo="openai/gsm8k", files="main/test-*.parquet")),
        ("hub:openai/gsm8k@r1/socratic/*", "gsm8k", HubDataset(repo="openai/gsm8k", files="socratic/*", revision="r1")),
    ],
)
def test_dataset_names_are_parsed(data: str, task: str, expected: HubDataset) -> None:
    assert parse_hub_name(data) == (task, expected)


@pytest.mark.parametrize("data", ["hub:", "hub:name", "hub:/name", "hub:org/", "hub:or g/x"])
def test_invalid_dataset_names_are_refused(data: str) -> None:
    with pytest.raises(OptionError, match="Not a valid hub data set name"):
        load_tasks((), data, None)


def test_other_dataset_at_revision(hub: FakeHub) -> None:
    hub.files["org/mine"] = {"train.jsonl": lines({"prompt": "No"}), "test.jsonl": lines({"prompt": "Yes"})}
    (task,) = load_tasks((), "hub:org/mine@v2", None)
    assert (task.name, task.prompts[0].id, task.prompts[0].turns) == ("mine", "mine/0", ("Yes",))
    assert hub.fetched == [("org/mine", "test.jsonl", "v2")]


def test_shards_are_read_one_after_another(hub: FakeHub) -> None:
    names = [f"data/test-0000{n}-of-00003.jsonl" for n in (2, 0, 1)]
    hub.files["org/mine"] = {name: lines({"prompt": name}) for name in names}
    (task,) = load_tasks((), "hub:org/mine", None)
    assert [prompt.turns[0] for prompt in task.prompts] == sorted(names)
    assert [prompt.id for prompt in task.prompts] == ["mine/0", "mine/1", "mine/2"]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["train.json", "validation.json"], ["validation.json"]),
        (["only.jsonl", "README.md"], ["only.jsonl"]),
        (["a/test/0.parquet", "a/train/0.parquet"], ["a/test/0.parquet"]),
        (["contest.jsonl", "test_v2.jsonl"], ["test_v2.jsonl"]),
        (
            ["data/train-00000-of-00001-a09b74b3ef9c3b56.parquet"],
            ["data/train-00000-of-00001-a09b74b3ef9c3b56.parquet"],
        ),
    ],
)
def test_the_test_split_is_preferred(names: list[str], chosen: list[str]) -> None:
    assert choose_files(HubDataset(repo="org/x"), names) == chosen


def test_several_tables_are_not_mixed() -> None:
    names = ["main/test-00000-of-00001.parquet", "socratic/test-00000-of-00001.parquet"]
    with pytest.raises(
        DraftwoodError, match=r"several prompt files.*\n.*\n.*hub:org/x/main/test-00000-of-00001\.parquet"
    ):
        choose_files(HubDataset(repo="org/x"), names)
    assert choose_files(HubDataset(repo="org/x", files="socratic/*"), names) == names[1:]


def test_missing_file_is_reported() -> None:
    with pytest.raises(DraftwoodError, match=r"no matching prompt file\n  got: b\.jsonl\n  allowed: a\.jsonl"):
        choose_files(HubDataset(repo="org/x", files="b.jsonl"), ["a.jsonl", "README.md"])
    with pytest.raises(DraftwoodError, match="no matching prompt file"):
        choose_files(HubDataset(repo="org/x"), ["README.md"])


# Failures


def test_invalid_row_is_named_by_hub_path(hub: FakeHub) -> None:
    hub.files["org/mine"] = {"test.jsonl": lines({"prompt": "Yes"}) + "{broken\n"}
    with pytest.raises(PromptError, match=r"^org/mine/test\.jsonl, line 2 is not valid JSON"):
        load_tasks((), "hub:org/mine", None)


def test_unreachable_hub(hub: FakeHub) -> None:
    hub.fails = ConnectionError("no route\nand more")
    with pytest.raises(
        DraftwoodError, match=r"org/mine could not be fetched.*\n.*ConnectionError: no route\n.*folder"
    ) as told:
        load_tasks((), "hub:org/mine", None)
    assert "switched off" not in str(told.value)


@pytest.mark.parametrize("variable", ["DRAFTWOOD_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_only_the_cache_is_used(variable: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files["org/mine"] = {"train.jsonl": lines({"prompt": "No"}), "test.jsonl": lines({"prompt": "Yes"})}
    monkeypatch.setenv(variable, "1")
    with pytest.raises(DraftwoodError, match=r"not in the cache\n.*switched off"):
        load_tasks((), "hub:org/mine", None)
    monkeypatch.delenv(variable)
    online = load_tasks((), "hub:org/mine", None)
    monkeypatch.setenv(variable, "1")
    asked = list(hub.asked)
    assert load_tasks((), "hub:org/mine", None) == online
    assert hub.asked == asked


def test_hub_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"draftwood\[hub\]"):
        load_tasks(["gsm8k"], "hub", None)
