"""Bad input and colours on the command line."""

from __future__ import annotations

import io
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftwood
from draftwood.cli.console.terminal import Paint, ProgressBar, duration, quote, replace_controls, width
from draftwood.cli.main import build_parser, parse
from draftwood.cli.options import name_flags
from draftwood.engine import Engine, TokenEvent
from draftwood.llm import LLM
from tests.tools.cli import ESCAPE, SHORT, TINY, Command, Terminal, _plain_environment, draftwood_command  # noqa: F401 - fixtures

# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--model", "tinny"), "no model of this name"),
        (("--model", "./nowhere"), "no such file or folder"),
        ((*TINY, "--drafter", "pdl"), "Did you mean 'pld'?"),
        ((*TINY, "--drafter-option", "dephth=3"), "has no option 'dephth'"),
        ((*TINY, "--drafter-option", "depth"), "KEY=VALUE"),
        ((*TINY, "--drafter-option", "depth=0"), "depth must be a whole number"),
        ((*TINY, "--sources", "context+nothing"), "sources must be different sources joined by '+'"),
        ((*TINY, "--drafter", "goose", "--sources", "context"), "has no option 'sources'"),
        ((*TINY, "--temperature", "nan"), "--temperature is out of range"),
        ((*TINY, "--temperature", "-1"), "--temperature is out of range"),
        ((*TINY, "--temperature", "warm"), "invalid float value"),
        ((*TINY, "--top-p", "0"), "--top-p is out of range"),
        ((*TINY, "--max-tokens", "0"), "--max-tokens must be a whole number"),
        ((*TINY, "--seed", "-1"), "seed must be a whole number"),
        ((*TINY, "--n", "0"), "n must be a whole number"),
        ((*TINY, "--stop", ""), "stop must be one or several texts"),
        (("--model", "tiny", "--budget", "0"), "budget must be a number"),
        (("--model", "tiny", "--budget", "many"), "budget must be a number"),
        ((*TINY, "--dtype", "int8"), "invalid choice"),
        ((*TINY, "--device", "toaster"), "got: 'toaster'"),
        ((*TINY, "--file", "/nowhere.txt"), "/nowhere.txt cannot be read"),
        ((*TINY, "--quiet", "--compare"), "--quiet hides the comparison"),
        ((*TINY, "--quiet", "--stats"), "not allowed with"),
        ((*TINY, "--raw", "--system", "be brief"), "A system message needs a chat template"),
        ((*TINY, "--device", "cuda"), "Use --device cpu"),
        ((*TINY, "--no-such-option"), "unrecognized arguments"),
    ],
)
def test_bad_options_exit_with_2_and_explain(argv: tuple[str, ...], message: str, draftwood_command: Command) -> None:
    result = draftwood_command("generate", "hello", *argv)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (("datastore", "build", "a", "--out", "x", "b", "--force", "c"), "files"),
        (("bench", "report", "--json", "a", "--color", "never", "b", "c"), "runs"),
        (("train", "data", "a", "b", "--out", "x", "c"), "files"),
    ],
)
def test_options_may_appear_between_list_items(argv: tuple[str, ...], name: str) -> None:
    assert getattr(build_parser().parse_args(argv), name) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (("generate", "Write", "a", "haiku"), "draftwood generate 'Write a haiku'"),
        (("generate", "Write", "a", "haiku", *SHORT), "draftwood generate 'Write a haiku'"),
        (("Write", "a", "haiku"), "draftwood generate 'Write a haiku'"),
        (("generat", "Write a haiku"), "Did you mean 'generate'?"),
        (("hello",), "If it is a prompt: draftwood generate hello"),
    ],
)
def test_words_without_quotes_get_a_hint(argv: tuple[str, ...], hint: str, draftwood_command: Command) -> None:
    result = draftwood_command(*argv)
    assert result.code == 2
    assert hint in result.err
    assert "usage" not in result.err


def test_output_is_another_name_of_out() -> None:
    for given in (["--output", "x"], ["--output=x"], ["--out", "x"]):
        assert parse(["datastore", "build", "a", *given]).out == "x"
        assert parse(["export", "head", "--to", "vllm", *given]).out == "x"


@pytest.mark.parametrize("argv", [("two words", *SHORT), (*SHORT, "two words")])
def test_a_prompt_alone_generates(argv: tuple[str, ...], draftwood_command: Command) -> None:
    assert draftwood_command(*argv).out == draftwood_command("generate", "two words", *SHORT).out


def test_flags_are_named_as_they_are_typed() -> None:
    def named(text: str, param: str | None = None) -> str:
        return name_flags(text, param, Namespace(device="cpu", max_tokens=3, stop=[]))

    assert named("Use device='cpu' or device=cpu.") == "Use --device cpu or --device cpu."
    assert named("max_tokens is 0; raise max_tokens or cache_tokens") == (
        "--max-tokens is 0; raise --max-tokens or cache_tokens"  # the command has no --cache-tokens
    )
    assert named("run.max_tokens and --max-tokens, my_max_tokens, stop it") == (
        "run.max_tokens and --max-tokens, my_max_tokens, stop it"
    )
    assert named("stop must be text", "stop") == "--stop must be text"
    assert name_flags("raise cache_tokens", None, None) == "raise --cache-tokens"


def test_empty_prompt_is_refused_before_model_is_resolved(draftwood_command: Command) -> None:
    result = draftwood_command("generate", "--model", "/no/such/model.gguf", "")
    assert result.code == 2
    assert "The prompt is empty" in result.err


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
    assert "The prompt is missing" in draftwood_command("generate", *TINY).err


def test_unreadable_files_are_refused(draftwood_command: Command, tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (tmp_path / "none", "cannot be read"),
        (tmp_path, "cannot be read"),
        (binary, "not valid UTF-8"),
    ):
        result = draftwood_command("generate", "--file", str(path), *TINY)
        assert (result.code, message in result.err) == (2, True)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_non_text_bytes_are_refused(command: str, draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for errors in ("strict", "surrogateescape"):  # the encoding of stdin depends on the locale
        stream = io.TextIOWrapper(io.BytesIO(b"ab\xff\n"), encoding="utf-8", errors=errors)
        monkeypatch.setattr("sys.stdin", stream)
        result = draftwood_command(command, *SHORT)
        assert (result.code, "not valid UTF-8" in result.err) == (2, True)
    assert draftwood_command("generate", "ab\udcff", *SHORT).code == 2


def test_debug_shows_traceback(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = ("generate", "hello", *TINY, "--temperature", "-1")
    assert "Traceback" in draftwood_command(*bad, "--debug").err
    monkeypatch.setenv("DRAFTWOOD_DEBUG", "1")
    assert "Traceback" in draftwood_command(*bad).err


def test_internal_error_shows_traceback_and_asks_for_report(
    draftwood_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "request", lambda *_, **__: 1 / 0)
    result = draftwood_command("generate", "hello", *TINY)
    assert result.code == 1
    assert "ZeroDivisionError" in result.err
    assert "Please report it" in result.err


def test_an_interrupt_ends_cleanly(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "request", interrupted)
    result = draftwood_command("generate", "hello", *TINY)
    assert (result.code, result.err) == (130, "\ndraftwood: interrupted\n")


def test_ctrl_c_prints_what_was_generated_so_far(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draftwood_command("generate", "abab", *SHORT).out
    events = Engine.events

    def interrupted(self: Engine, request_ids: list[int]) -> Iterator[TokenEvent]:
        for number, event in enumerate(events(self, request_ids)):
            if number == 5:
                raise KeyboardInterrupt
            yield event

    monkeypatch.setattr(Engine, "events", interrupted)
    result = draftwood_command("generate", "abab", "--no-stream", *SHORT)
    assert result.code == 130
    assert len(result.out) > 1
    assert whole.startswith(result.out.removesuffix("\n"))
    assert "stopped" in result.err
    content = json.loads(draftwood_command("generate", "abab", "--json", *SHORT).out)
    assert content["finish_reason"] == "cancelled"
    assert whole.startswith(content["text"])
    several = draftwood_command("generate", "abab", "--n", "2", "--temperature", "1", "--seed", "1", *SHORT)
    assert several.code == 130
    assert several.err.count("stopped") == 2


# -- colours ---------------------------------------------------------------------------------------------------------

# A negative penalty: the random model then generates predictable text.
REPEATING = ("generate", "abab", "--frequency-penalty=-50", *SHORT)


def test_colours_are_used_on_terminals_only(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = draftwood_command(*REPEATING)
    assert ESCAPE not in plain.out + plain.err
    coloured = draftwood_command(*REPEATING, "--color", "always")
    assert ESCAPE in coloured.out
    assert "■" in coloured.err
    assert "copied from the text" in coloured.err
    assert "context" in draftwood_command(*REPEATING, "--color", "always", "--stats").err
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
def test_colour_settings_precedence(
    choice: str, environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Paint(choice, Terminal()).enabled is expected
    assert Paint(choice, io.StringIO()).enabled is (choice == "always")


def test_each_source_has_a_distinct_colour_and_target_has_none() -> None:
    paint = Paint("always", io.StringIO())
    names = ["context", "transitions", "ngrams", "datastore", "mine", "yours"]
    assert len({paint.source("x", name) for name in names}) == len(names)
    assert paint.source("x", "mine") == paint.source("x", "mine")
    assert paint.source("x", "target") == "x"


def test_control_characters_are_not_written_to_terminal() -> None:
    assert replace_controls("a\x1b[31mb\tc\n\x9b\x00") == "a\ufffd[31mb\tc\n\ufffd\ufffd"
    assert quote("a\n\x1b") == "'a\\n\\x1b'"


def test_wide_characters_take_two_columns() -> None:
    assert [width(text) for text in ("abc", "日本", "e\u0301", "")] == [3, 4, 1, 0]


def test_progress_is_a_bar_on_terminals_and_a_line_elsewhere() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        progress = ProgressBar(Paint("never", stream))
        for label in ("fetching", "loading"):
            for done in range(4):
                progress(label, done, 3)
    assert pipe.getvalue() == "fetching\nloading\n"
    assert "\r" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_progress_shows_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("draftwood.cli.console.terminal.time.monotonic", lambda: now)
    terminal, pipe = Terminal(), io.StringIO()
    bars = [ProgressBar(Paint("never", stream)) for stream in (terminal, pipe)]
    for seconds, done in ((0.0, 4), (1.0, 5), (120.0, 6)):  # four of ten were done at the start
        now = 100.0 + seconds
        for bar in bars:
            bar("measuring", done, 10)
    assert "left" not in terminal.getvalue().split("\r")[-2]
    assert "60%  measuring, 4 min left" in terminal.getvalue()
    assert pipe.getvalue() == "measuring\nmeasuring: 60%, 4 min left\n"


def test_durations_are_readable() -> None:
    assert [duration(seconds) for seconds in (0.4, 59, 60, 3600, 4800)] == [
        "0 s",
        "59 s",
        "1 min",
        "1 h 0 min",
        "1 h 20 min",
    ]
