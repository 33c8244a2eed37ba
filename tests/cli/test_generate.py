"""``draftwood generate``: answers, JSON, comparison."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import draftwood
from draftwood.compare import Comparison, TimedRun, compare
from draftwood.config import DEFAULT_DRAFTER
from draftwood.engine import RequestStats
from draftwood.llm import LLM
from draftwood.targets.native.cpu import CpuDecoder
from tests.tools.cli import (  # noqa: F401 - fixtures  # noqa: F401 - fixtures
    SHORT,
    TINY,
    Command,
    Terminal,
    _plain_environment,
    draftwood_command,
    prompt_file,
    set_stdin,
)

# -- generate --------------------------------------------------------------------------------------------------------


def test_generate_writes_output_to_stdout_and_report_to_stderr(draftwood_command: Command) -> None:
    result = draftwood_command("generate", "abab", "--stats", *SHORT)
    assert result.code == 0
    with LLM("tiny", budget=8) as llm:
        params = draftwood.SamplingParams(max_tokens=12)
        expected = llm.chat([{"role": "user", "content": "abab"}], params)[0].text
    assert result.out == expected + "\n"
    for part in ("12 tokens", "tokens/s", "tau ", "cycles", "budget 8", DEFAULT_DRAFTER, "cut at --max-tokens 12"):
        assert part in result.err


def test_generate_raw_continues_text_unchanged(draftwood_command: Command) -> None:
    with LLM("tiny", budget=8) as llm:
        expected = llm.generate("abab", draftwood.SamplingParams(max_tokens=12))[0].text
    assert draftwood_command("generate", "abab", "--raw", *SHORT).out == expected + "\n"


def test_streaming_writes_the_same_text(draftwood_command: Command) -> None:
    whole = draftwood_command("generate", "abab", "--no-stream", *SHORT)
    assert draftwood_command("generate", "abab", "--stream", *SHORT).out == whole.out


def test_generate_json_prints_exactly_one_object(draftwood_command: Command) -> None:
    result = draftwood_command("generate", "abab", "--json", "--logprobs", "2", *SHORT)
    content = json.loads(result.out)
    assert set(content) == {
        "text", "token_ids", "finish_reason", "sources", "logprobs", "stats",
        "model", "backend", "dtype", "device", "drafter", "budget",
    }  # fmt: skip
    assert len(content["token_ids"]) == len(content["sources"]) == len(content["logprobs"]) == 12
    assert [len(entry["top"]) for entry in content["logprobs"]] == [2] * 12
    assert content["stats"]["output_tokens"] == 12
    assert (content["model"], content["drafter"], content["budget"]) == ("tiny", DEFAULT_DRAFTER, 8)
    with LLM("tiny", budget=8) as llm:
        running = (llm.info.backend, str(llm.info.dtype), str(llm.info.device))
    assert (content["backend"], f"torch.{content['dtype']}", content["device"]) == running
    assert result.err == ""


def test_closing_line_describes_the_trees(draftwood_command: Command) -> None:
    prompt = ("generate", "abab", "--raw", "--stats", "--model", "tiny", "--max-tokens", "12")
    stats = json.loads(draftwood_command(*prompt, "--budget", "8", "--json").out)["stats"]
    assert stats["mean_tree_size"] == pytest.approx((stats["drafted_nodes"] + stats["cycles"]) / stats["cycles"], 1e-3)
    closing = draftwood_command(*prompt, "--budget", "8").err
    assert f" · trees of {stats['mean_tree_size']:.1f} · " in closing
    assert " · budget 8 · " in closing
    assert " · budget auto · " in draftwood_command(*prompt).err
    assert " · trees of 1.0 · " in draftwood_command(*prompt, "--drafter", "plain").err
    assert RequestStats().mean_tree_size == 0


@pytest.mark.parametrize(
    ("dtype", "why", "advice"),
    [
        ("float32", "no C compiler found; install a C compiler such as gcc or clang", "install a C compiler"),
        ("float16", "", "Try --dtype float32"),
    ],
)
def test_slow_decoder_warning_is_printed_once_on_stderr(
    dtype: str, why: str, advice: str, draftwood_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDecoder, "why_declined", lambda *_: "declined")
    monkeypatch.setattr(CpuDecoder, "why_unavailable", lambda: why)
    monkeypatch.setattr("draftwood.cli.console.loading._slow_on_cpu", lambda info: info.backend == "eager")
    result = draftwood_command("generate", "abab", "--json", "--device", "cpu", "--dtype", dtype, *SHORT)
    assert result.code == 0
    assert json.loads(result.out)["backend"] == "eager"
    assert result.err.count("slow eager decoder") == 1
    assert why in result.err
    assert advice in result.err


def test_several_samples(draftwood_command: Command) -> None:
    sampled = (*SHORT, "--n", "3", "--temperature", "1", "--seed", "7")
    samples = json.loads(draftwood_command("generate", "abab", "--json", *sampled).out)["samples"]
    assert len({tuple(sample["token_ids"]) for sample in samples}) == 3
    text = draftwood_command("generate", "abab", *sampled)
    assert all(sample["text"] in text.out for sample in samples)
    assert text.err.count("tokens/s") == 3


def test_logprobs_are_shown_with_the_output(draftwood_command: Command) -> None:
    result = draftwood_command("generate", "abab", "--logprobs", "1", *TINY, "--max-tokens", "3", "--drafter", "plain")
    assert len(result.err.strip().split("\n")) == 1 + 3


def test_generate_compares_with_plain_decoding(draftwood_command: Command) -> None:
    result = draftwood_command("generate", "abab", "--compare", *SHORT)
    assert "x the speed of plain decoding" in result.err
    assert "identical output" in result.err
    content = json.loads(draftwood_command("generate", "abab", "--compare", "--json", *SHORT).out)
    assert content["compare"]["identical"] is True
    assert content["compare"]["speedup"] > 0


def test_sampled_comparison_needs_seed(draftwood_command: Command) -> None:
    sampled = ("generate", "abab", "--compare", "--temperature", "1", *SHORT)
    assert "same distribution" in draftwood_command(*sampled, "--seed", "0").err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--compare", "--n", "2"), "A comparison needs exactly one sample"),
        (("--compare", "--temperature", "1"), "A comparison of sampled output needs a seed"),
        (("--stream", "--n", "2"), "got: --stream --n 2"),
        (("--stream", "--json"), "got: --stream --json"),
    ],
)
def test_conflicting_options_are_refused_before_model_loads(
    options: tuple[str, ...], message: str, draftwood_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood.cli.generation.generate.load_llm", lambda *_, **__: pytest.fail("a model is loaded"))
    result = draftwood_command("generate", "abab", *options, *SHORT)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


@pytest.mark.parametrize("option", ["--json", "--n=2"])
def test_default_streaming_is_disabled_by_other_options(
    option: str, draftwood_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", Terminal())
    assert draftwood_command("generate", "abab", option, *SHORT).code == 0
    assert draftwood_command("generate", "abab", option, "--no-stream", *SHORT).code == 0


def test_comparison_does_not_benefit_from_remembered_output() -> None:
    speeds = iter([(6, 20.0), (12, 10.0), (2, 1.0), (12, 9.0)])  # cycles and seconds: the second run remembers all

    class Remembering:
        def generate(self, *_: object, drafter: str | None, prediction: str | None) -> list[SimpleNamespace]:
            cycles, seconds = next(speeds)
            stats = RequestStats(output_tokens=12, cycles=cycles, total_seconds=seconds)
            return [SimpleNamespace(token_ids=[1, 2], stats=stats)]

    comparison = compare(cast(LLM, Remembering()), [1], draftwood.SamplingParams())
    assert comparison.speculative.stats.cycles == 6
    assert comparison.plain.stats.total_seconds == 9.0
    assert comparison.speedup == pytest.approx(9 / 20)


@pytest.mark.parametrize("argument", [(), ("-",)])
def test_prompt_from_stdin(
    argument: tuple[str, ...], draftwood_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = draftwood_command("generate", "abab", *SHORT).out
    set_stdin(monkeypatch, "abab\n")
    assert draftwood_command("generate", *argument, *SHORT).out == expected


def test_piped_text_follows_the_prompt(
    draftwood_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in ``cat notes.txt | draftwood generate "Summarise this"``: nothing that was given is dropped."""
    path = tmp_path / "notes.txt"
    path.write_text("file\n")
    for parts, piped, joined in [
        (("Summarise:",), "one\ntwo\n", "Summarise:\n\none\ntwo"),
        (("Summarise:",), "", "Summarise:"),
        (("--file", str(path)), "piped\n", "file\n\npiped"),
        (("Summarise:", "--file", str(path)), "piped\n", "Summarise:\n\nfile\n\npiped"),
        (("-", "--file", str(path)), "piped\n", "file\n\npiped"),
    ]:
        set_stdin(monkeypatch, "")
        expected = draftwood_command("generate", joined, *SHORT).out
        set_stdin(monkeypatch, piped)
        assert draftwood_command("generate", *parts, *SHORT).out == expected
    monkeypatch.setattr("sys.stdin", None)  # closed, as in a service
    assert draftwood_command("generate", "abab", *SHORT).code == 0
    assert draftwood_command("generate", *SHORT).code == 2


def test_a_system_message_is_part_of_the_chat(draftwood_command: Command) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "abab"}]
    with LLM("tiny", budget=8) as llm:
        expected = llm.chat(messages, draftwood.SamplingParams(max_tokens=12))[0].text
    assert draftwood_command("generate", "abab", "--system", "Be brief.", *SHORT).out == expected + "\n"


def test_few_statistics_by_default_all_if_asked_for_and_none_if_quiet(draftwood_command: Command) -> None:
    short = draftwood_command("generate", "abab", *SHORT)
    (line,) = short.err.strip().split("\n")
    assert line.startswith("12 tokens · ")
    assert " tokens per pass" in line
    assert "tau" not in line
    quiet = draftwood_command("generate", "abab", "--quiet", *SHORT)
    assert (quiet.out, quiet.err) == (short.out, "")
    assert "tau" in draftwood_command("generate", "abab", "--stats", *SHORT).err


def test_a_comparison_is_made_of_the_figures_it_prints(
    draftwood_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run may be slower than the one that is compared: one speed is printed, and the ratio is of it."""

    def faster(self: object, *_: object, **__: object) -> Comparison:
        def run(seconds: float) -> TimedRun:
            return TimedRun([1], RequestStats(output_tokens=12, cycles=6, drafted_nodes=9, total_seconds=seconds))

        return Comparison(speculative=run(0.1), plain=run(0.2), is_greedy=True)

    monkeypatch.setattr("draftwood.cli.generation.generate.compare", faster)
    lines = draftwood_command("generate", "abab", "--compare", *SHORT).err.strip().split("\n")
    assert lines[0].startswith("12 tokens · 120.0 tokens/s · ")
    assert lines[-1].startswith("2.00x the speed of plain decoding (120.0 against 60.0 tokens/s)")
    content = json.loads(draftwood_command("generate", "abab", "--compare", "--json", *SHORT).out)
    assert content["stats"]["tokens_per_second"] == content["compare"]["tokens_per_second"] == 120.0


def test_json_repeats_the_budget_that_was_asked_for(draftwood_command: Command, prompt_file: Path) -> None:
    automatic = ("--model", "tiny", "--max-tokens", "4", "--json")
    for command in (("generate", "abab"), ("inspect", "tree", "abab"), ("check", "--prompts", str(prompt_file))):
        assert json.loads(draftwood_command(*command, *automatic).out)["budget"] == "auto"
        assert json.loads(draftwood_command(*command, *automatic, "--budget", "8").out)["budget"] == 8


def test_prompt_from_file(draftwood_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("abab\n")
    expected = draftwood_command("generate", "abab", *SHORT).out
    assert draftwood_command("generate", "--file", str(path), *SHORT).out == expected


def test_options_reach_the_drafter(draftwood_command: Command) -> None:
    def drafted(*options: str) -> int:
        out = draftwood_command("generate", "abababababab", "--raw", "--json", *options, *SHORT).out
        return int(json.loads(out)["stats"]["drafted_nodes"])

    assert drafted("--drafter-option", "depth=1") < drafted("--drafter-option", "depth=7")
    assert drafted("--drafter", "plain") == 0


def test_output_ends_before_stop_string(draftwood_command: Command) -> None:
    whole = draftwood_command("generate", "abab", *SHORT).out
    stop = next(letter for letter in whole[2:] if letter.isascii() and letter.isprintable())
    assert draftwood_command("generate", "abab", "--stop", stop, *SHORT).out == whole[: whole.index(stop)] + "\n"
