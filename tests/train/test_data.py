"""Generating training data: texts of the model, resumed runs, refused folders."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwood import LLM, SamplingParams
from draftwood.config import ModelOptions
from draftwood.errors import OptionError, PromptError
from draftwood.targets.load import load_target
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import BOS
from draftwood.train.data.dialogue import Dialogue
from draftwood.train.data.make import Part
from draftwood.train.data.prompts import read_sources
from draftwood.train.data.read import TrainingData
from draftwood.train.data.shards import DataError
from tests.tools.train_data import HAS_SMOLLM2, PREAMBLE, contents, lines, loaded, make, rules_of, template_codec


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    rows = [{"turns": [f"question {number}", "and then?"][: 1 + number % 2]} for number in range(5)]
    return lines(tmp_path / "prompts.jsonl", *rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_generated_by_the_model(temperature: float, prompts: str, tmp_path: Path) -> None:
    codec = template_codec(PREAMBLE)
    make(tmp_path / "data", (prompts,), loaded(codec), temperature=temperature, seed=5)
    data = TrainingData.open(tmp_path / "data")
    assert sorted(set(data.prompts.tolist())) == [0, 1, 2, 3, 4]
    rules = rules_of(codec, 1024, max_tokens=12, temperature=temperature, seed=5)
    read, _ = read_sources([prompts])
    with LLM.from_target(tiny_target(), codec, drafter="plain", budget=1) as llm:
        for index, prompt in enumerate(read):
            dialogue = Dialogue(index, prompt, rules)
            while (ask := dialogue.ask()) is not None:
                (answer,) = llm.generate(ask.prompt_ids, ask.params)
                dialogue.take(answer.token_ids, answer.text)
            made = [data[place] for place in np.flatnonzero(data.prompts == index)]
            for (ids, mask), (other_ids, other_mask) in zip(made, dialogue.transcript.examples(), strict=True):
                assert ids.tolist() == other_ids.tolist()
                assert mask.tolist() == other_mask.tolist()


def test_batches_and_drafters_do_not_change_the_texts(prompts: str, tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{"batch": 1}, {"batch": 8}, {"drafter": "pld"}, {"shard_size": 100}]
    texts = []
    for number, option in enumerate(options):
        make(tmp_path / str(number), (prompts,), self_made=3, **option)
        data = TrainingData.open(tmp_path / str(number))
        texts.append([(ids.tolist(), answered.tolist()) for ids, answered in map(data.__getitem__, range(len(data)))])
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_synthetic_data_depends_on_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make(tmp_path / name, self_made=4, seed=seed)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    ids = [TrainingData.open(tmp_path / name)[0].token_ids.tolist() for name in ("a", "c")]
    assert ids[0] != ids[1]
    assert ids[0][0] == BOS


def test_manifest_describes_the_data(prompts: str, tmp_path: Path) -> None:
    manifest = make(tmp_path / "data", (prompts,), self_made=2, seed=9, licence="CC-BY", max_length=60)
    content = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert content["model"]["fingerprint"].startswith("LlamaForCausalLM 258x48x2, 71088 parameters, ")
    assert (content["settings"]["seed"], content["settings"]["max_length"]) == (9, 60)
    assert content["sources"][0]["name"] == "prompts.jsonl"
    assert (content["licence"], content["prompts"], content["complete"]) == ("CC-BY", 7, True)
    data = TrainingData.open(tmp_path / "data")
    assert len(data) == manifest.counts["examples"] == sum(shard["examples"] for shard in content["shards"])
    assert data.lengths.sum() == manifest.counts["tokens"]
    answered = sum(int(data[place].answered.sum()) for place in range(len(data)))
    assert answered == manifest.counts["answered_tokens"]
    assert data.lengths.max() <= 60
    assert str(tmp_path) not in json.dumps(content)


def test_too_long_prompts_are_skipped_and_counted(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"turns": ["x" * 100]}, {"turns": ["y"]}, {"turns": ["y", "x" * 100]})
    manifest = make(tmp_path / "data", (path,), max_length=40)
    counts = {name: manifest.counts[name] for name in ("examples", "too_long", "cut_short", "empty")}
    assert counts == {"examples": 2, "too_long": 1, "cut_short": 1, "empty": 0}
    with pytest.raises(PromptError, match="No prompt leaves room"):
        make(tmp_path / "none", (path,), max_length=3)
    with pytest.raises(OptionError, match="longer than the context"):
        make(tmp_path / "never", (path,), max_length=2000)


@pytest.mark.parametrize("stop_at", [1, 40, 90])
def test_resumed_run_gives_identical_files(stop_at: int, prompts: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"self_made": 2, "temperature": 0.8}
    make(tmp_path / "whole", (prompts,), **options)
    heard = 0

    def stop(tokens: int) -> None:
        nonlocal heard
        heard += tokens
        if heard >= stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "stopped", (prompts,), heard=stop, **options)
    before = contents(tmp_path / "stopped")
    whole = contents(tmp_path / "whole")
    assert all(whole[name] == content for name, content in before.items() if name != "manifest.json")
    assert len(before) < len(whole)
    with pytest.raises(DataError, match="not complete"):
        TrainingData.open(tmp_path / "stopped")
    (tmp_path / "stopped" / ".part-00003.safetensors.partial-abc").write_bytes(b"left by a kill")
    told: list[int] = []
    make(tmp_path / "stopped", (prompts,), heard=told.append, **options)
    assert contents(tmp_path / "stopped") == whole
    assert told
    told.clear()
    make(tmp_path / "stopped", (prompts,), heard=told.append, **options)
    assert not told  # nothing was left to do
    (tmp_path / "stopped" / "part-00001.safetensors").unlink()
    make(tmp_path / "stopped", (prompts,), **options)
    assert contents(tmp_path / "stopped") == whole


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_parts_give_the_files_of_the_whole(order: tuple[int, ...], prompts: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"self_made": 4, "temperature": 0.8}
    make(tmp_path / "whole", (prompts,), **options)
    whole = contents(tmp_path / "whole")
    tokens: list[int] = []
    for number in order:
        before = contents(tmp_path / "parts") if (tmp_path / "parts").exists() else {}
        foreign = tmp_path / "parts" / f".part-0000{number % 3}.safetensors.partial-abc"  # of another part
        if before:
            foreign.write_bytes(b"being written")
        manifest = make(tmp_path / "parts", (prompts,), part=Part(number, 3), heard=tokens.append, **options)
        assert manifest.complete == (number == order[-1])
        if before:
            foreign.unlink()  # still there
        after = contents(tmp_path / "parts")
        assert all(after[name] == content for name, content in before.items() if name != "manifest.json")
    assert contents(tmp_path / "parts") == whole
    assert sum(tokens) > 0
    tokens.clear()
    make(tmp_path / "parts", (prompts,), part=Part(2, 3), heard=tokens.append, **options)
    assert not tokens


def test_processes_at_the_same_time_make_one_data_set(prompts: str, tmp_path: Path) -> None:
    """As torchrun starts them: four processes, and the last one completes the manifest."""
    common = ("--model", "tiny", "--max-tokens", "8", "--shard-size", "1", "--json")
    argv = [sys.executable, "-m", "draftwood", "train", "data", prompts, *common, "--out", str(tmp_path / "parts")]
    ranks = [{**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "4"} for rank in range(4)]
    started = [subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) for env in ranks]
    said = [json.loads(process.communicate(timeout=300)[0]) for process in started]
    assert [process.returncode for process in started] == [0] * 4
    assert any("examples" in one for one in said)
    argv[-1] = str(tmp_path / "whole")
    subprocess.run(argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


@pytest.mark.parametrize("text", ["", "2", "3/2", "0/2", "a/b", "-1/2"])
def test_wrong_parts_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="as in 2/4"):
        Part.parse(text)


def test_more_parts_than_shards_are_refused(prompts: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--shard-size 1 or less"):
        make(tmp_path / "data", (prompts,), part=Part(4, 5))


def test_an_interrupted_engine_can_be_used_again(prompts: str, tmp_path: Path) -> None:
    model = loaded()
    free = model.target.can_open(model.target.num_slots)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "data", (prompts,), model, heard=stop)
    assert free
    assert model.target.can_open(model.target.num_slots)


def test_folder_is_resumed_only_by_the_same_run(prompts: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make(folder, (prompts,))
    before = contents(folder)
    with pytest.raises(OptionError, match=r"other settings[\s\S]*settings.seed 1[\s\S]*settings.seed 0"):
        make(folder, (prompts,), seed=1)
    other = lines(tmp_path / "other.jsonl", {"turns": ["else"]})
    with pytest.raises(OptionError, match="sources"):
        make(folder, (other,))
    with pytest.raises(OptionError, match="dtype"):
        make(folder, (prompts,), load_target(ModelOptions(model="tiny", dtype="bfloat16", device="cpu")))
    assert contents(folder) == before
    make(folder, (prompts,), licence="MIT", batch=1)  # these do not change answers
    make(folder, (prompts,))
    assert json.loads((folder / "manifest.json").read_text())["licence"] == "MIT"


def test_existing_output_is_refused(prompts: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="other things in it"):
        make(tmp_path, (prompts,))
    with pytest.raises(OptionError, match="this is a file"):
        make(Path(prompts), (prompts,))
    with pytest.raises(OptionError, match="Unknown drafter"):
        make(tmp_path / "data", (prompts,), drafter="gose")
    assert not (tmp_path / "data").exists()


def test_full_disk_is_reported_and_loses_one_shard(
    prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "whole", (prompts,))
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if "part-00001" in path.name:
            write(path, content[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(DataError, match="No space left on device") as refusal:
            make(tmp_path / "data", (prompts,))
    assert "same command again" in str(refusal.value)
    assert sorted(contents(tmp_path / "data")) == ["manifest.json", "part-00000.safetensors"]
    make(tmp_path / "data", (prompts,))
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


def test_run_is_not_resumed_from_damaged_shard(prompts: str, tmp_path: Path) -> None:
    make(tmp_path / "data", (prompts,))
    part = tmp_path / "data" / "part-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(DataError, match="damaged"):
        make(tmp_path / "data", (prompts,))


def test_progress_counts_prompts_up_to_the_last(prompts: str, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    make(tmp_path / "data", (prompts,), progress=lambda *step: steps.append(step))
    counted = [done for label, done, total in steps if (label, total) == ("answering prompts", 5)]
    assert counted == sorted(counted)
    assert {0, 5} <= set(counted)
    assert len(set(counted)) > 3


@pytest.mark.model
@pytest.mark.skipif(not HAS_SMOLLM2, reason="the default model is not in the cache")
def test_default_model_generates_answers_and_prompts(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"turns": ["Say only the word yes.", "Once more."]})
    model = load_target(ModelOptions(model="smollm2", dtype="float32", device="cpu", cache_tokens=2048))
    make(tmp_path / "data", (path,), model, self_made=1, max_tokens=16)
    data = TrainingData.open(tmp_path / "data")
    data.check_model(model.target)
    assert data.prompts.tolist() == [0, 1]  # two turns, one text
    ids, answered = data[0]
    edges = np.flatnonzero(np.diff(answered.astype(int)) == 1)
    assert len(edges) == 2
    with LLM.from_target(model.target, model.codec, drafter="plain", budget=1) as llm:
        (answer,) = llm.generate(data.prompt_ids(0), SamplingParams(max_tokens=16))
    begin = int(edges[0]) + 1
    assert ids[begin : begin + len(answer.token_ids)].tolist() == answer.token_ids
    text = model.codec.decode(ids.tolist(), skip_special=False)
    assert "<|im_start|>user\nOnce more.<|im_end|>\n<|im_start|>assistant\n" in text
