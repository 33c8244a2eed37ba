"""The command line: every command on the built-in model, in process; a few true processes at the end."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import pytest

import draftwood
from draftwood import check as check_module
from draftwood.check import TIE_TOLERANCE
from draftwood.cli.main import main
from draftwood.cli.terminal import Paint, ProgressBar, printable, quoted, width
from draftwood.cli.treeview import tree_lines
from draftwood.compare import compare
from draftwood.config import DEFAULT_DRAFTER
from draftwood.engine import RequestStats, TokenEvent
from draftwood.llm import LLM
from draftwood.target.native.cpu import CpuDecoder
from draftwood.target.tiny import ByteTokenizer
from draftwood.tree import TreeBuilder

TINY = ("--model", "tiny", "--budget", "8")
SHORT = (*TINY, "--max-tokens", "12")
ESCAPE = "\x1b["


class Result(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Result]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal())  # a person who types nothing
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "DRAFTWOOD_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    if not CpuDecoder.is_available():  # its absence is told in a test of its own
        monkeypatch.setattr("draftwood.cli.loading._slow_on_cpu", lambda _: False)


@pytest.fixture
def draftwood_command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process; the exit code is the same whoever decided on it."""

    def run(*argv: str) -> Result:
        try:
            code = main(argv)
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("one two one two one\n\nthree\n", encoding="utf-8")
    return path


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


# -- generate --------------------------------------------------------------------------------------------------------


def test_generate_answers_on_stdout_and_reports_on_stderr(draftwood_command: Command) -> None:
    result = draftwood_command("generate", "abab", *SHORT)
    assert result.code == 0
    with LLM("tiny", budget=8) as llm:
        params = draftwood.SamplingParams(max_tokens=12)
        expected = llm.chat([{"role": "user", "content": "abab"}], params)[0].text
    assert result.out == expected + "\n"
    for part in ("12 tokens", "tokens/s", "tau ", "cycles", "budget 8", DEFAULT_DRAFTER, "cut at the length limit"):
        assert part in result.err


def test_generate_raw_continues_the_text_as_it_is(draftwood_command: Command) -> None:
    with LLM("tiny", budget=8) as llm:
        expected = llm.generate("abab", draftwood.SamplingParams(max_tokens=12))[0].text
    assert draftwood_command("generate", "abab", "--raw", *SHORT).out == expected + "\n"


def test_streaming_writes_the_same_text(draftwood_command: Command) -> None:
    whole = draftwood_command("generate", "abab", "--no-stream", *SHORT)
    assert draftwood_command("generate", "abab", "--stream", *SHORT).out == whole.out


def test_generate_json_is_one_object_and_nothing_else(draftwood_command: Command) -> None:
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


def test_the_closing_line_tells_the_trees_that_were_built(draftwood_command: Command) -> None:
    prompt = ("generate", "abab", "--raw", "--model", "tiny", "--max-tokens", "12")
    stats = json.loads(draftwood_command(*prompt, "--budget", "8", "--json").out)["stats"]
    assert stats["mean_tree_size"] == pytest.approx((stats["drafted_nodes"] + stats["cycles"]) / stats["cycles"], 1e-3)
    assert f" · trees of {stats['mean_tree_size']:.1f} · budget 8 · " in draftwood_command(*prompt, "--budget", "8").err
    assert " · budget auto · " in draftwood_command(*prompt).err
    assert " · trees of 1.0 · " in draftwood_command(*prompt, "--drafter", "plain").err
    assert RequestStats().mean_tree_size == 0


@pytest.mark.parametrize(
    ("dtype", "why", "advice"),
    [
        ("float32", "no C compiler found", "install a C compiler such as gcc or clang"),
        ("float16", "", "Try --dtype float32"),
    ],
)
def test_the_slow_decoder_is_told_once_and_beside_the_answer(
    dtype: str, why: str, advice: str, draftwood_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDecoder, "supports", lambda *_: False)
    monkeypatch.setattr(CpuDecoder, "why_unavailable", lambda: why)
    monkeypatch.setattr("draftwood.cli.loading._slow_on_cpu", lambda info: info.backend == "eager")
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
    assert text.err.count("tau") == 3


def test_logprobs_are_shown_beside_the_answer(draftwood_command: Command) -> None:
    result = draftwood_command("generate", "abab", "--logprobs", "1", *TINY, "--max-tokens", "3")
    assert len(result.err.strip().split("\n")) == 1 + 3


def test_generate_compares_with_plain_decoding(draftwood_command: Command) -> None:
    result = draftwood_command("generate", "abab", "--compare", *SHORT)
    assert "x the speed of plain decoding" in result.err
    assert "identical output" in result.err
    content = json.loads(draftwood_command("generate", "abab", "--compare", "--json", *SHORT).out)
    assert content["compare"]["identical"] is True
    assert content["compare"]["speedup"] > 0


def test_a_sampled_comparison_needs_a_seed_and_promises_no_equal_draws(draftwood_command: Command) -> None:
    sampled = ("generate", "abab", "--compare", "--temperature", "1", *SHORT)
    assert "same distribution" in draftwood_command(*sampled, "--seed", "0").err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--compare", "--n", "2"), "A comparison is made with one sample"),
        (("--compare", "--temperature", "1"), "A comparison of sampled output needs a seed"),
        (("--stream", "--n", "2"), "got: --stream --n 2"),
        (("--stream", "--json"), "got: --stream --json"),
    ],
)
def test_what_makes_no_sense_together_does_not_wait_for_a_model(
    options: tuple[str, ...], message: str, draftwood_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood.cli.generate.load_llm", lambda *_, **__: pytest.fail("a model is loaded"))
    result = draftwood_command("generate", "abab", *options, *SHORT)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


@pytest.mark.parametrize("option", ["--json", "--n=2"])
def test_streaming_by_default_gives_way(
    option: str, draftwood_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", Terminal())
    assert draftwood_command("generate", "abab", option, *SHORT).code == 0
    assert draftwood_command("generate", "abab", option, "--no-stream", *SHORT).code == 0


def test_a_drafter_that_remembers_the_answer_gains_nothing_in_a_comparison() -> None:
    speeds = iter([(6, 20.0), (12, 10.0), (2, 1.0), (12, 9.0)])  # cycles and seconds: the second draft knows it all

    class Remembering:
        def generate(self, *_: object, drafter: str | None) -> list[SimpleNamespace]:
            cycles, seconds = next(speeds)
            stats = RequestStats(output_tokens=12, cycles=cycles, total_seconds=seconds)
            return [SimpleNamespace(token_ids=[1, 2], stats=stats)]

    comparison = compare(cast(LLM, Remembering()), [1], draftwood.SamplingParams())
    assert comparison.speculative.stats.cycles == 6
    assert comparison.plain.stats.total_seconds == 9.0
    assert comparison.speedup == pytest.approx(9 / 20)


@pytest.mark.parametrize("argument", [(), ("-",)])
def test_the_prompt_comes_through_a_pipe(
    argument: tuple[str, ...], draftwood_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = draftwood_command("generate", "abab", *SHORT).out
    type_in(monkeypatch, "abab\n")
    assert draftwood_command("generate", *argument, *SHORT).out == expected


def test_the_prompt_comes_from_a_file(draftwood_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("abab\n")
    expected = draftwood_command("generate", "abab", *SHORT).out
    assert draftwood_command("generate", "--file", str(path), *SHORT).out == expected


def test_options_reach_the_drafter(draftwood_command: Command) -> None:
    def drafted(*options: str) -> int:
        out = draftwood_command("generate", "abababababab", "--raw", "--json", *options, *SHORT).out
        return int(json.loads(out)["stats"]["drafted_nodes"])

    assert drafted("--drafter-option", "max_draft=1") < drafted("--drafter-option", "max_draft=7")
    assert drafted("--drafter", "plain") == 0


def test_a_stop_text_ends_the_output_before_it(draftwood_command: Command) -> None:
    whole = draftwood_command("generate", "abab", *SHORT).out
    stop = next(letter for letter in whole[2:] if letter.isascii() and letter.isprintable())
    assert draftwood_command("generate", "abab", "--stop", stop, *SHORT).out == whole[: whole.index(stop)] + "\n"


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--model", "tinny"), "no model of this name"),
        (("--model", "./nowhere"), "no such file or folder"),
        ((*TINY, "--drafter", "pdl"), "Did you mean 'pld'?"),
        ((*TINY, "--drafter-option", "max_dratf=3"), "has no option 'max_dratf'"),
        ((*TINY, "--drafter-option", "max_draft"), "KEY=VALUE"),
        ((*TINY, "--drafter-option", "max_draft=0"), "at least one token"),
        ((*TINY, "--temperature", "nan"), "temperature is out of range"),
        ((*TINY, "--temperature", "-1"), "temperature is out of range"),
        ((*TINY, "--temperature", "warm"), "invalid float value"),
        ((*TINY, "--top-p", "0"), "top_p is out of range"),
        ((*TINY, "--max-tokens", "0"), "max_tokens must be a whole number"),
        ((*TINY, "--seed", "-1"), "seed must be a whole number"),
        ((*TINY, "--n", "0"), "n must be a whole number"),
        ((*TINY, "--stop", ""), "stop must be a text"),
        (("--model", "tiny", "--budget", "0"), "budget is no usable number"),
        (("--model", "tiny", "--budget", "many"), "budget is no usable number"),
        ((*TINY, "--dtype", "int8"), "invalid choice"),
        ((*TINY, "--device", "toaster"), "got: 'toaster'"),
        ((*TINY, "--file", "/nowhere.txt"), "two prompts"),
        ((*TINY, "--no-such-option"), "unrecognized arguments"),
    ],
)
def test_bad_options_exit_with_2_and_say_what_is_wrong(
    argv: tuple[str, ...], message: str, draftwood_command: Command
) -> None:
    result = draftwood_command("generate", "hello", *argv)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


@pytest.mark.parametrize("argv", [("",), ("  \n",), ("", "--raw")])
def test_an_empty_prompt_is_refused(argv: tuple[str, ...], draftwood_command: Command) -> None:
    result = draftwood_command("generate", *argv, *TINY)
    assert result.code == 2
    assert "The prompt is empty" in result.err


def test_raw_white_space_can_be_continued(draftwood_command: Command) -> None:
    with LLM("tiny", budget=8) as llm:
        expected = llm.generate(" ", draftwood.SamplingParams(max_tokens=12))[0].text
    result = draftwood_command("generate", " ", "--raw", *SHORT)
    assert (result.code, result.out) == (0, expected + "\n")


def test_a_prompt_that_does_not_fit_is_refused(draftwood_command: Command) -> None:
    result = draftwood_command("generate", "x" * 3000, *TINY)
    assert result.code == 2
    assert "The prompt is longer than" in result.err


def test_no_prompt_at_a_terminal_is_refused(draftwood_command: Command) -> None:
    assert "There is no prompt" in draftwood_command("generate", *TINY).err


def test_unreadable_files_are_refused(draftwood_command: Command, tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in ((tmp_path / "none", "cannot be read"), (tmp_path, "cannot be read"), (binary, "no UTF-8")):
        result = draftwood_command("generate", "--file", str(path), *TINY)
        assert (result.code, message in result.err) == (2, True)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_bytes_that_are_no_text_are_refused(
    command: str, draftwood_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for errors in ("strict", "surrogateescape"):  # what stdin does depends on the locale
        stream = io.TextIOWrapper(io.BytesIO(b"ab\xff\n"), encoding="utf-8", errors=errors)
        monkeypatch.setattr("sys.stdin", stream)
        result = draftwood_command(command, *SHORT)
        assert (result.code, "no UTF-8 text" in result.err) == (2, True)
    assert draftwood_command("generate", "ab\udcff", *SHORT).code == 2


def test_debug_shows_where_an_error_arose(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = ("generate", "hello", *TINY, "--temperature", "-1")
    assert "Traceback" in draftwood_command(*bad, "--debug").err
    monkeypatch.setenv("DRAFTWOOD_DEBUG", "1")
    assert "Traceback" in draftwood_command(*bad).err


def test_a_bug_shows_itself_and_asks_to_be_reported(
    draftwood_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "stream", lambda *_: 1 / 0)
    result = draftwood_command("generate", "hello", *TINY)
    assert result.code == 1
    assert "ZeroDivisionError" in result.err
    assert "Please report it" in result.err


def test_an_interrupt_ends_cleanly(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    result = draftwood_command("generate", "hello", *TINY)
    assert (result.code, result.err) == (130, "\ndraftwood: interrupted\n")


# -- colours ---------------------------------------------------------------------------------------------------------

# A reward for repetition: the random model then writes text that can be guessed.
REPEATING = ("generate", "abab", "--frequency-penalty=-50", *SHORT)


def test_colours_are_for_terminals(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = draftwood_command(*REPEATING)
    assert ESCAPE not in plain.out + plain.err
    coloured = draftwood_command(*REPEATING, "--color", "always")
    assert ESCAPE in coloured.out
    assert "■" in coloured.err
    assert "context" in coloured.err
    monkeypatch.setenv("NO_COLOR", "1")
    assert ESCAPE in draftwood_command(*REPEATING, "--color", "always").out


def test_a_terminal_gets_a_coloured_stream(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    draftwood_command(*REPEATING)
    assert ESCAPE in screen.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    screen.truncate(0)
    draftwood_command(*REPEATING)
    assert ESCAPE not in screen.getvalue()


@pytest.mark.parametrize(
    ("choice", "environment", "expected"),
    [
        ("auto", {}, True),
        ("auto", {"NO_COLOR": "1"}, False),
        ("auto", {"TERM": "dumb"}, False),
        ("never", {}, False),
        ("always", {"NO_COLOR": "1"}, True),
    ],
)
def test_who_decides_on_colours(
    choice: str, environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Paint(choice, Terminal()).enabled is expected
    assert Paint(choice, io.StringIO()).enabled is (choice == "always")


def test_each_source_has_a_colour_of_its_own_and_the_target_none() -> None:
    paint = Paint("always", io.StringIO())
    names = ["context", "transitions", "ngrams", "datastore", "mine", "yours"]
    assert len({paint.source("x", name) for name in names}) == len(names)
    assert paint.source("x", "mine") == paint.source("x", "mine")
    assert paint.source("x", "target") == "x"


def test_a_terminal_never_sees_control_characters_of_the_model() -> None:
    assert printable("a\x1b[31mb\tc\n\x9b\x00") == "a\ufffd[31mb\tc\n\ufffd\ufffd"
    assert quoted("a\n\x1b") == "'a\\n\\x1b'"


def test_wide_letters_take_two_columns() -> None:
    assert [width(text) for text in ("abc", "日本", "e\u0301", "")] == [3, 4, 1, 0]


def test_progress_is_a_bar_on_a_terminal_and_a_line_anywhere_else() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        progress = ProgressBar(Paint("never", stream))
        for label in ("fetching", "loading"):
            for done in range(4):
                progress(label, done, 3)
    assert pipe.getvalue() == "fetching\nloading\n"
    assert "\r" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


# -- chat ------------------------------------------------------------------------------------------------------------


def test_chat_keeps_the_cache_between_turns(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "abab\n\nand then?\n/stats\n/quit\nnever heard\n")
    result = draftwood_command("chat", *SHORT)
    assert result.code == 0
    assert "0 of " in result.err
    turns = [line for line in result.err.split("\n") if "reused" in line]
    assert len(turns) == 2
    assert int(turns[1].split(" · ")[5].split(" of ")[0]) > 12
    assert "2 answers · 24 tokens" in result.err
    assert "budget 8" in result.err


def test_chat_commands(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "/stats\n/help\n/what\n/system be brief\n/system\n/reset\n")
    result = draftwood_command("chat", *SHORT)
    assert result.out == ""
    lines = result.err.strip().split("\n")
    assert lines[0] == "Nothing was said yet."
    assert lines[1].startswith("/help, /reset")
    assert lines[2].startswith("There is no /what.")
    assert lines[3:] == ["The system message is set.", "There is no system message now.", "A new conversation."]


def test_chat_sends_the_system_message_and_forgets_on_reset(
    draftwood_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[list[tuple[str, str]]] = []
    answer = LLM.stream_chat

    def listening(self: LLM, messages: list[dict[str, str]], *rest: object) -> Iterator[TokenEvent]:
        heard.append([(message["role"], message["content"]) for message in messages])
        return answer(self, messages, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(LLM, "stream_chat", listening)
    type_in(monkeypatch, "one\n/system S\ntwo\n/reset\nthree\n")
    out = draftwood_command("chat", "--system", "first", *SHORT).out
    assert [len(messages) for messages in heard] == [2, 4, 2]
    assert [messages[0] for messages in heard] == [("system", "first"), ("system", "S"), ("system", "S")]
    assert out.startswith(heard[1][2][1])


def test_chat_goes_on_after_a_message_that_does_not_fit(
    draftwood_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["x" * 3000, "short", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr("sys.stdout", Terminal())
    result = draftwood_command("chat", *SHORT)
    assert result.code == 0
    assert "/reset starts a new conversation" in result.err
    assert "12 tokens" in result.err


def test_a_piped_chat_ends_at_a_message_that_does_not_fit(
    draftwood_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "short\n" + "x" * 3000 + "\nshort\n")
    result = draftwood_command("chat", *SHORT)
    assert result.code == 2
    assert "draftwood: error: " in result.err
    assert "The prompt is longer than" in result.err
    assert result.err.count("12 tokens") == 1


def test_ctrl_c_stops_one_answer_only(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = LLM.stream_chat
    calls: list[int] = []

    def interrupted(self: LLM, *rest: object) -> Iterator[TokenEvent]:
        calls.append(1)
        events = answer(self, *rest)  # type: ignore[arg-type]
        yield next(events)
        if len(calls) == 1:
            raise KeyboardInterrupt
        yield from events

    monkeypatch.setattr(LLM, "stream_chat", interrupted)
    type_in(monkeypatch, "one\ntwo\n")
    result = draftwood_command("chat", *SHORT)
    assert result.code == 0
    assert "stopped" in result.err
    assert "12 tokens" in result.err


def test_chat_at_a_terminal(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Iterator[str | BaseException] = iter(["hello", KeyboardInterrupt(), "/stats", EOFError()])
    prompts: list[str] = []

    def typed(prompt: str) -> str:
        prompts.append(prompt)
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    screen = Terminal()
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("sys.stdout", screen)
    result = draftwood_command("chat", *SHORT)
    assert result.code == 0
    assert len(prompts) == 4
    assert "tiny, drafted by" in result.err
    assert "1 answer ·" in result.err
    assert printable(screen.getvalue().replace(ESCAPE, "")) == screen.getvalue().replace(ESCAPE, "")


def test_a_model_without_a_template_cannot_chat(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "has_chat", False)
    type_in(monkeypatch, "hello\n")
    result = draftwood_command("chat", *SHORT)
    assert (result.code, "no chat template" in result.err) == (2, True)
    raw = draftwood_command("generate", "abab", "--raw", *SHORT).out
    assert draftwood_command("generate", "abab", *SHORT).out == raw


# -- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_draws_the_trees(draftwood_command: Command) -> None:
    result = draftwood_command("inspect", "tree", "abababab", "--raw", "--cycles", "2", *SHORT)
    assert result.code == 0
    assert [line[:8] for line in result.out.split("\n") if line.startswith("cycle")] == ["cycle 1:", "cycle 2:"]
    assert "bonus" in result.out
    assert ESCAPE not in result.out


def test_inspect_json(draftwood_command: Command) -> None:
    argv = ("inspect", "tree", "abababab", "--raw", "--json", "--cycles", "2", "--skip", "1", *SHORT)
    content = json.loads(draftwood_command(*argv).out)
    assert [cycle["cycle"] for cycle in content["cycles"]] == [2, 3]
    cycle = content["cycles"][0]
    sizes = {len(cycle[name]) for name in ("tokens", "texts", "parents", "depths", "sources", "probs")}
    assert len(sizes) == 1
    assert cycle["path"][0] == 0
    assert cycle["bonus"] == cycle["emitted"][-1]


def test_inspect_past_the_end_says_so(draftwood_command: Command) -> None:
    result = draftwood_command("inspect", "tree", "abab", "--skip", "50", *SHORT)
    assert "ended within the first 50 cycles" in result.err
    assert draftwood_command("inspect", "tree", "abab", "--cycles", "0", *SHORT).code == 2


def test_a_tree_is_drawn_with_branches_for_siblings_only() -> None:
    builder = TreeBuilder(ord("a"))
    b = builder.add(0, ord("b"), "context", 0.8)
    c = builder.add(b, ord("c"), "context", 0.7)
    builder.add(c, ord("d"), "ngrams", 0.5)
    e = builder.add(c, ord("e"), "context", 0.25)
    builder.add(0, ord("\n"), "ngrams", 0.1)
    event = TokenEvent(
        request_id=1,
        token_ids=(*map(ord, "bcez"),),
        sources=("context", "context", "context", "target"),
        texts=("b", "c", "e", "z"),
        logprobs=(),
        finish_reason=None,
        stats=RequestStats(),
        tree=builder.build(),
        path=(0, b, c, e),
    )
    lines = tree_lines(event, ByteTokenizer(), Paint("never", io.StringIO()))
    assert [line.rstrip() for line in lines] == [
        "  'a'                   root",
        "  ├─ 'b'                context  0.800  ✓",
        "  │  'c'                context  0.700  ✓",
        "  │  ├─ 'd'             ngrams   0.500",
        "  │  └─ 'e'             context  0.250  ✓",
        "  └─ '\\n'               ngrams   0.100",
        "  'z'                   target   bonus",
    ]


# -- check -----------------------------------------------------------------------------------------------------------


def test_check_finds_identical_outputs(draftwood_command: Command, prompt_file: Path) -> None:
    result = draftwood_command("check", "--prompts", str(prompt_file), *SHORT)
    assert result.code == 0
    assert result.out.startswith("2 prompts, 24 positions in float32 · 2 identical · 0 numeric ties · 0 errors · tau ")


def test_check_limit_and_json(draftwood_command: Command, prompt_file: Path) -> None:
    argv = ("check", "--prompts", str(prompt_file), "--limit", "1", "--json", "--raw", *SHORT)
    content = json.loads(draftwood_command(*argv).out)
    assert content["summary"]["prompts"] == content["summary"]["identical"] == 1
    assert [record["verdict"] for record in content["records"]] == ["identical"]
    assert content["dtype"] == "float32"


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_check_refuses_a_limit_below_one(limit: str, draftwood_command: Command, prompt_file: Path) -> None:
    result = draftwood_command("check", "--prompts", str(prompt_file), "--limit", limit, *SHORT)
    assert result.code == 2
    assert "limit" in result.err
    assert "1 or more" in result.err
    assert "has no prompts" not in result.err


def test_check_reads_every_kind_of_jsonl(draftwood_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "one"}, {"turns": ["two", "more"]}, {"messages": [{"role": "user", "content": "three"}]}]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    assert "3 identical" in draftwood_command("check", "--prompts", str(path), *SHORT).out


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculative runs that get their fourth token wrong."""
    generate = LLM.generate

    def wrong(self: LLM, *args: object, drafter: str | None = None) -> list[draftwood.Completion]:
        completions = generate(self, *args, drafter=drafter)  # type: ignore[arg-type]
        if drafter is None:
            for completion in completions:
                completion.token_ids[3] = (completion.token_ids[3] + 1) % 256
        return completions

    monkeypatch.setattr(LLM, "generate", wrong)


@pytest.mark.usefixtures("lying")
def test_check_reports_an_error_with_its_place(draftwood_command: Command, prompt_file: Path) -> None:
    result = draftwood_command("check", "--prompts", str(prompt_file), *SHORT)
    assert result.code == 1
    lines = result.out.strip().split("\n")
    assert lines[0].startswith("prompt 1, token 3: ")
    assert "ERROR (gap " in lines[0]
    assert "2 errors" in lines[-1]
    content = json.loads(draftwood_command("check", "--prompts", str(prompt_file), "--json", *SHORT).out)
    difference = content["records"][0]["difference"]
    assert difference["position"] == 3
    assert difference["speculative_id"] == (difference["plain_id"] + 1) % 256
    assert difference["gap"] > difference["tolerance"] == TIE_TOLERANCE["float32"]


@pytest.mark.usefixtures("lying")
def test_check_knows_a_numeric_tie(
    draftwood_command: Command, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(check_module.TIE_TOLERANCE, "float32", 1000.0)
    result = draftwood_command("check", "--prompts", str(prompt_file), *SHORT)
    assert result.code == 0
    assert "numeric tie (gap " in result.out
    assert "2 numeric ties" in result.out


def test_an_output_that_ends_early_is_an_error(
    draftwood_command: Command, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = LLM.generate

    def short(self: LLM, *args: object, drafter: str | None = None) -> list[draftwood.Completion]:
        completions = generate(self, *args, drafter=drafter)  # type: ignore[arg-type]
        if drafter is None:
            completions[0].token_ids.pop()
        return completions

    monkeypatch.setattr(LLM, "generate", short)
    result = draftwood_command("check", "--prompts", str(prompt_file), *SHORT)
    assert result.code == 1
    assert "the end, plainly" in result.out


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("", "p.txt", "has no prompts"),
        ("\n \n", "p.txt", "has no prompts"),
        ('{"prompt": "x"', "p.jsonl", "line 1 is not valid JSON"),
        ('{"prompt": "x"}\n{"text": "x"}', "p.jsonl", "line 2 has no prompt"),
        ('{"turns": []}', "p.jsonl", "has no prompt"),
        ('{"messages": [{"role": "user"}]}', "p.jsonl", "has no prompt"),
        ('{"prompt": ""}', "p.jsonl", "The prompt is empty"),
    ],
)
def test_check_refuses_files_without_prompts(
    content: str, name: str, message: str, draftwood_command: Command, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    result = draftwood_command("check", "--prompts", str(path), *SHORT)
    assert result.code == 2
    assert message in result.err


def test_check_is_for_greedy_decoding(draftwood_command: Command, prompt_file: Path) -> None:
    for option in (("--temperature", "1"), ("--repetition-penalty", "1.2")):
        result = draftwood_command("check", "--prompts", str(prompt_file), *option, *SHORT)
        assert (result.code, "greedy" in result.err) == (2, True)


# -- models, drafters, the rest --------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one small folder that looks like a model."""
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path))
    folder = tmp_path / "models" / "mini"
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16, "hidden_size": 8,
        "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    return tmp_path


def test_models_list_path_show_and_rm(draftwood_command: Command, home: Path) -> None:
    listed = draftwood_command("models", "list").out
    assert "smollm2" in listed
    assert "mini" in listed
    assert draftwood_command("models", "path", "mini").out == f"{home / 'models' / 'mini'}\n"
    assert draftwood_command("models", "get", "mini").out == f"{home / 'models' / 'mini'}\n"
    shown = draftwood_command("models", "show", "mini").out
    for name in ("parameters", "layers", "context", "cache in float32", "cache in bfloat16", "origin"):
        assert name in shown
    assert draftwood_command("models", "rm", "mini").code == 0
    assert "mini" not in draftwood_command("models", "list").out


@pytest.mark.usefixtures("home")
def test_models_json(draftwood_command: Command) -> None:
    listed = json.loads(draftwood_command("models", "list", "--json").out)["models"]
    assert {entry["name"] for entry in listed} == {"smollm2", "mini"}
    shown = json.loads(draftwood_command("models", "show", "mini", "--json").out)
    assert (shown["num_parameters"], shown["num_layers"], shown["context_length"]) == (6, 2, 64)
    assert json.loads(draftwood_command("models", "rm", "mini", "--json").out)["freed_bytes"] > 0


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("action", ["path", "rm", "show", "get"])
def test_unknown_models_are_refused(action: str, draftwood_command: Command) -> None:
    result = draftwood_command("models", action, "minni")
    assert result.code == 2
    assert "mini" in result.err


def test_drafters_are_listed_with_their_options(draftwood_command: Command) -> None:
    out = draftwood_command("drafters").out
    assert f"{DEFAULT_DRAFTER}  (default)" in out
    assert "max_draft" in out
    content = json.loads(draftwood_command("drafters", "--json").out)
    assert content["default"] == DEFAULT_DRAFTER
    assert content["drafters"]["pld"]["options"] == {"max_ngram": 3, "min_ngram": 1, "max_draft": 20}
    assert content["drafters"]["plain"]["options"] == {}


COMMANDS = [
    ("generate",), ("chat",), ("inspect", "tree"), ("check",), ("drafters",),
    *(("models", action) for action in ("list", "get", "path", "rm", "show")),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(command: tuple[str, ...], draftwood_command: Command) -> None:
    result = draftwood_command(*command, "--help")
    assert result.code == 0
    examples = result.out.split("examples:\n")[1]
    assert 2 <= examples.count("draftwood ") <= 3


def test_version_and_no_command(draftwood_command: Command) -> None:
    assert draftwood_command("--version").out == f"draftwood {draftwood.__version__}\n"
    assert draftwood_command().code == 2
    assert draftwood_command("dance").code == 2


# -- true processes --------------------------------------------------------------------------------------------------


def start(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "draftwood", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, **options)  # type: ignore[call-overload, no-any-return]


def test_help_does_not_wait_for_torch() -> None:
    program = (
        "import sys\nfrom draftwood.cli.main import build_parser\nbuild_parser().format_help()\n"
        "print([name for name in ('torch', 'numpy', 'tokenizers') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.stdout == "[]\n"


def test_a_process_answers_a_pipe() -> None:
    run = start("generate", "--json", *SHORT, input="abab\n")
    assert run.returncode == 0
    assert len(json.loads(run.stdout)["token_ids"]) == 12
    assert run.stderr == "" or not CpuDecoder.is_available()


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m draftwood generate abab --stream {' '.join(SHORT)} | true"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in run.stderr
    assert "BrokenPipe" not in run.stderr
