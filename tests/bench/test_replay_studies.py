"""Studies on recordings: methods that can be replayed, long contexts, many trajectories, and the commands."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwood import LLM, SamplingParams
from draftwood.bench.records.methods import BenchMethod
from draftwood.bench.replay import (
    Recording,
    compute_figures,
    format_figures,
    list_warnings,
    load_recording,
    replay,
    replay_methods,
    study_contexts,
    study_trajectories,
)
from draftwood.bench.replay.rows import ON_TEXT
from draftwood.bench.replay.studies import ContextFiller
from draftwood.cli.main import build_parser
from draftwood.cli.options import load_function
from draftwood.drafters import Drafter, DraftRequest, PromptRows, VerifiedTree
from draftwood.errors import OptionError
from draftwood.targets.native.target import NativeTarget
from draftwood.tree import DraftTree
from tests.tools.replay import (
    SAMPLED,
    TEXTS,
    goose,  # noqa: F401 - a fixture
    method_of,
    recorded,
    run_without_recording,
    target,  # noqa: F401 - a fixture
)

# -- what cannot be replayed -----------------------------------------------------------------------------------------


def test_methods_that_cannot_be_replayed_are_refused(goose: Recording) -> None:
    with pytest.raises(OptionError, match="depends on the cost of passes"):
        replay(goose, method_of("goose", budget="auto"))
    with pytest.raises(OptionError, match=r"top_k 40\n.*at most 16\n.*--width 40"):
        replay(goose, method_of("goose:top_k=40"))
    with pytest.raises(OptionError, match=r"its own draft tokens.*\n.*a recording of goose"):
        replay(goose, method_of("lookahead"))


# -- studies of scale ------------------------------------------------------------------------------------------------


def test_long_contexts_are_filled_with_texts_of_other_prompts(goose: Recording) -> None:
    filler = ContextFiller(goose)
    own, *others = goose.requests
    text = filler.before(0, 300)
    assert text is not None
    assert len(text.tokens) == 300 - len(own.prompt_ids)
    there = others[0].text + others[1].text
    assert text.tokens == (there * 9)[: len(text.tokens)]
    last = len(others[0].text) - 1
    assert not text.known[last]  # nothing is known after the last token of a text
    assert text.known[:last].all()
    row = others[0].rows.find(ON_TEXT, 4)
    assert (text.ids[4] == others[0].rows.arrays().ids[row]).all()
    assert filler.before(0, len(own.prompt_ids)) is None


def test_conversation_is_not_used_as_its_own_context(target: NativeTarget) -> None:
    recording = recorded(target, [method_of("pld")], SamplingParams(max_tokens=6), ["ab ab", "cd cd"], turns=2)
    text = ContextFiller(recording).before(0, 400)
    assert text is not None
    others = recording.requests[2].text + recording.requests[3].text
    assert text.tokens == (others * 9)[: len(text.tokens)]


def test_drafter_reads_all_known_rows_of_the_context(goose: Recording) -> None:
    read: list[int] = []
    prompts: list[list[int]] = []

    class Reader(Drafter):
        name = "reader"
        wants_prompt_logits = True

        def begin(self, request: DraftRequest) -> None:
            prompts.append(list(request.prompt_ids))
            self.last = request.prompt_ids[-1]

        def read_prompt(self, rows: PromptRows) -> None:
            read.extend(range(rows.start, rows.start + len(rows.logits)))

        def propose(self, budget: int) -> DraftTree:
            return DraftTree.root_only(self.last)

        def observe(self, verified: VerifiedTree) -> None:
            self.last = verified.emitted[-1]

    one = Recording(target=goose.target, requests=goose.requests[:1], methods=goose.methods)
    text = ContextFiller(goose).before(0, 500)
    assert text is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftwood.drafters.registry.drafter_class", lambda name: Reader)
        replay(one, BenchMethod(label="r", drafter="reader", memory="prompt", budget=4), before=lambda number: text)
    assert prompts == [[*text.tokens, *goose.requests[0].prompt_ids]]
    unknown = np.flatnonzero(~text.known).tolist()
    assert unknown
    assert read == [place for place in range(499) if place not in unknown]


def test_context_study_has_one_row_per_length(goose: Recording) -> None:
    lines = study_contexts(goose, method_of("goose"), [1, 700])
    assert [line.context for line in lines] == [1, 700]
    plain = compute_figures(goose, method_of("goose"), replay(goose, method_of("goose")))
    assert (lines[0].tau, lines[0].cycles) == (plain.tau, plain.cycles)  # every prompt is longer than one token
    assert {line.tokens for line in lines} == {plain.tokens}
    one = Recording(target=goose.target, requests=goose.requests[:1])
    with pytest.raises(OptionError, match="only one"):
        study_contexts(one, method_of("goose"), [700])


def test_trajectory_study_counts_the_first_samples(target: NativeTarget) -> None:
    method = method_of("stand")
    recording = recorded(target, [method], SAMPLED)
    stats = run_without_recording(target, method, SAMPLED)  # 3 samples of each prompt
    lines = study_trajectories(recording, method, [1, 2, 3])
    for line, count in zip(lines, (1, 2, 3), strict=True):
        first = [each for number, each in enumerate(stats) if number % 3 < count]
        assert line.trajectories == count
        assert line.requests == len(first)
        assert line.tokens == sum(each.output_tokens for each in first)
        assert line.cycles == sum(each.cycles for each in first)
    with pytest.raises(OptionError, match=r"allowed: 1 to 3\n.*--samples 64"):
        replay_methods(recording, [method], trajectories=[1, 64])
    with pytest.raises(OptionError, match="Only one study at a time"):
        replay_methods(recording, [method], trajectories=[1], contexts=[64])
    with pytest.raises(OptionError, match=r"got: .*auto"):
        replay_methods(recording, [method], contexts=["auto"])  # type: ignore[list-item]


def test_tables_omit_empty_columns(goose: Recording) -> None:
    lines = replay_methods(goose, [method_of("goose"), method_of("plain", 1)])
    header, first, second = format_figures(lines)
    assert "context" not in header
    assert first[header.index("recorded")] == first[header.index("tau")]
    assert list_warnings(lines) == []
    assert "for goose:" in list_warnings([replace(lines[0], coverage=0.0)])[0]
    assert list_warnings([replace(lines[0], coverage=0.2, estimated=0.4)]) == []
    assert (second[header.index("known")], second[header.index("tau")]) == ("", "1.000")


# -- the commands ----------------------------------------------------------------------------------------------------


def command(*argv: str) -> argparse.Namespace:
    """Arguments as the program parses them: defaults of `bench` itself must not interfere."""
    return build_parser().parse_args(["bench", *argv])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    lines = [json.dumps({"id": str(n), "task": "letters", "turns": [text]}) for n, text in enumerate(TEXTS)]
    (folder / "letters.jsonl").write_text("\n".join(lines) + "\n")
    path = folder / "a.recording"
    options = ["--model", "tiny", "--data", str(folder), "--tasks", "letters", "--limit", "2", "--max-tokens", "16"]
    args = command("record", "--drafters", "goose,recycling:top_k=4", "--budget", "12", *options, "--out", str(path))
    assert load_function(args.run)(args) == 0
    return path


def test_record_and_replay_from_the_command_line(
    file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "figures.json"
    args = command(
        "replay", str(file), "--drafters", "goose,recycling:top_k=4,pld", "--budget", "12", "--json", "--out", str(out)
    )
    assert load_function(args.run)(args) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads(out.read_text())
    goose, recycling, pld = content["figures"]
    assert content["model"] == "tiny"
    assert goose["tau"] == goose["recorded_tau"]
    assert recycling["tau"] == recycling["recorded_tau"]
    assert pld["recorded_tau"] is None
    args = command("replay", str(file), "--drafters", "goose", "--budget", "8,12", "--context", "64,200")
    assert load_function(args.run)(args) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + 4
    assert table[1].split()[:4] == ["goose", "@8", "8", "64"]


def test_an_interrupted_recording_is_kept(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate, calls = LLM.generate, []

    def interrupted(self: LLM, *args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(self, *args, **options)

    monkeypatch.setattr(LLM, "generate", interrupted)
    path = tmp_path / "part.recording"
    args = command("record", "--model", "tiny", "--data", str(file.parent), "--max-tokens", "8", "--out", str(path))
    with pytest.raises(KeyboardInterrupt):
        load_function(args.run)(args)
    assert len(load_recording(path).requests) == 1
    assert "was interrupted" in capsys.readouterr().err


def test_a_recording_does_not_replace_a_folder(tmp_path: Path) -> None:
    args = command("record", "--model", "tiny", "--out", str(tmp_path))
    with pytest.raises(OptionError, match="not a folder"):
        load_function(args.run)(args)


def test_unwritable_output_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood.bench.replay.commands.load_target", lambda *_, **__: pytest.fail("too late"))
    (tmp_path / "file").touch()
    args = command("record", "--model", "tiny", "--out", str(tmp_path / "file" / "a.recording"))
    with pytest.raises(OptionError, match=r"a\.recording cannot be written"):
        load_function(args.run)(args)
