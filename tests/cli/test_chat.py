"""``draftwood chat`` and ``draftwood inspect tree``."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from draftwood.cli.console.stdin import DISCARD, join_lines
from draftwood.cli.console.terminal import Paint, replace_controls
from draftwood.cli.inspect.tree import tree_lines
from draftwood.config import SamplingParams
from draftwood.engine import GenerationRequest, RequestStats, TokenEvent
from draftwood.llm import LLM
from draftwood.text.bytes import ByteTokenizer
from draftwood.tree import TreeBuilder
from tests.tools.cli import ESCAPE, SHORT, TINY, Command, Terminal, _plain_environment, draftwood_command, set_stdin  # noqa: F401 - fixtures  # noqa: F401 - fixtures

# -- chat ------------------------------------------------------------------------------------------------------------


def test_chat_keeps_the_cache_between_turns(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, "abab\n\nand then?\n/stats\n/quit\nnever heard\n")
    result = draftwood_command("chat", "--stats", *SHORT)
    assert result.code == 0
    assert "0 of " in result.err
    turns = [line for line in result.err.split("\n") if "reused" in line]
    assert len(turns) == 2
    (reused,) = (part for part in turns[1].split(" · ") if " of " in part and part[0].isdigit())
    assert int(reused.split(" of ")[0]) > 12
    assert "2 answers · 24 tokens" in result.err
    assert "budget 8" in result.err


def test_chat_commands(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, "/stats\n/help\n/what\n/system be brief\n/system\n/reset\n")
    result = draftwood_command("chat", *SHORT)
    assert result.out == ""
    lines = result.err.strip().split("\n")
    assert lines[0] == "There are no answers yet."
    assert lines[1].startswith("/continue")
    assert lines[-4].startswith("Unknown command /what.")
    assert lines[-3:] == ["Set the system message.", "Removed the system message.", "Started a new conversation."]


def test_chat_sends_the_system_message_and_forgets_on_reset(
    draftwood_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[list[tuple[str, str]]] = []
    answer = LLM.stream_chat

    def listening(self: LLM, messages: list[dict[str, str]], *rest: object, **more: object) -> Iterator[TokenEvent]:
        heard.append([(message["role"], message["content"]) for message in messages])
        return answer(self, messages, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(LLM, "stream_chat", listening)
    set_stdin(monkeypatch, "one\n/system S\ntwo\n/reset\nthree\n")
    out = draftwood_command("chat", "--system", "first", *SHORT).out
    assert [len(messages) for messages in heard] == [2, 4, 2]
    assert [messages[0] for messages in heard] == [("system", "first"), ("system", "S"), ("system", "S")]
    assert out.startswith(heard[1][2][1])


def test_chat_continues_after_too_long_message(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["x" * 3000, "short", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr("sys.stdout", Terminal())
    result = draftwood_command("chat", *SHORT)
    assert result.code == 0
    assert "Type /reset to start a new conversation" in result.err
    assert "12 tokens" in result.err


def test_piped_chat_ends_at_too_long_message(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, "short\n" + "x" * 3000 + "\nshort\n")
    result = draftwood_command("chat", *SHORT)
    assert result.code == 2
    assert "draftwood: error: " in result.err
    assert "The prompt is longer than" in result.err
    assert result.err.count("12 tokens") == 1


def test_ctrl_c_stops_one_answer_only(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = LLM.stream_chat
    calls: list[int] = []

    def interrupted(self: LLM, *rest: object, **more: object) -> Iterator[TokenEvent]:
        calls.append(1)
        events = answer(self, *rest, **more)  # type: ignore[arg-type]
        yield next(events)
        if len(calls) == 1:
            raise KeyboardInterrupt
        yield from events

    monkeypatch.setattr(LLM, "stream_chat", interrupted)
    set_stdin(monkeypatch, "one\ntwo\n")
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
    assert "tiny, drafter" in result.err
    assert "1 answer ·" in result.err
    assert replace_controls(screen.getvalue().replace(ESCAPE, "")) == screen.getvalue().replace(ESCAPE, "")


def test_a_model_without_a_template_cannot_chat(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "has_chat", False)
    set_stdin(monkeypatch, "hello\n")
    result = draftwood_command("chat", *SHORT)
    assert (result.code, "no chat template" in result.err) == (2, True)
    set_stdin(monkeypatch, "")
    raw = draftwood_command("generate", "abab", "--raw", *SHORT).out
    assert draftwood_command("generate", "abab", *SHORT).out == raw


def test_chat_answers_do_not_stop_in_the_middle(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, "/set\n")
    assert "max_tokens 2048 · " in draftwood_command("chat", *TINY).err
    assert "(default: 2048)" in draftwood_command("chat", "--help").out


@pytest.fixture
def prompts_heard(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    heard: list[list[int]] = []
    request = LLM.request

    def listening(self: LLM, prompt_ids: Sequence[int], *rest: Any, **more: Any) -> GenerationRequest:
        heard.append(list(prompt_ids))
        return request(self, prompt_ids, *rest, **more)

    monkeypatch.setattr(LLM, "request", listening)
    return heard


def test_an_answer_that_was_cut_goes_on(
    draftwood_command: Command, monkeypatch: pytest.MonkeyPatch, prompts_heard: list[list[int]]
) -> None:
    with LLM("tiny") as llm:
        whole = llm.chat([{"role": "user", "content": "abab"}], SamplingParams(max_tokens=24))[0].token_ids
    prompts_heard.clear()
    set_stdin(monkeypatch, "/continue\nabab\n/continue\n/stats\nmore\n")
    result = draftwood_command("chat", *SHORT, "--stats")
    first, second, third = prompts_heard
    assert second == [*first, *whole[:12]]
    assert result.err.startswith("There is no answer that was cut.")
    reused = [line for line in result.err.split("\n") if "reused" in line]
    assert f"{len(first) + 11} of {len(second)} prompt tokens reused" in reused[1]
    assert "2 answers · " in result.err
    text = ByteTokenizer().decode(third)
    assert text.count("assistant: ") == 2
    assert text.index("user: more") > text.index("assistant: ")


def test_a_conversation_is_saved_and_continued(
    draftwood_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prompts_heard: list[list[int]]
) -> None:
    path = tmp_path / "talk.json"
    set_stdin(monkeypatch, f"/system S\nabab\n/save {path}\n")
    assert "Saved 2 messages" in draftwood_command("chat", *SHORT).err
    assert [message["role"] for message in json.loads(path.read_text())["messages"]] == ["user", "assistant"]
    set_stdin(monkeypatch, f"/load {path}\n/continue\nmore\n")
    assert "Loaded 2 messages" in draftwood_command("chat", *SHORT).err
    first, going_on, more = prompts_heard
    assert going_on[: len(first)] == first
    assert len(going_on) > len(first)
    assert ByteTokenizer().decode(more).startswith("system: S\nuser: abab\nassistant: ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/load", "name of the file is missing"),
        ("/save", "name of the file is missing"),
        ("/load /no/such/file", "cannot be read"),
        ("/load {bad}", "is not valid JSON"),
        ("/load {other}", "is not a saved conversation"),
        ("/save {folder}/no/such/\0/x", "cannot be"),
        ("/set warmth 3", "Cannot set this"),
        ("/set temperature warm", "temperature is out of range"),
        ("/drafter gose", "Did you mean 'goose'?"),
    ],
)
def test_a_wrong_command_does_not_end_the_chat(
    line: str, message: str, draftwood_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bad").write_text("{")
    (tmp_path / "other").write_text('{"messages": [1]}')
    if "{folder}" in line:
        (tmp_path / "no").write_text("a file, not a folder")
        line = f"/save {tmp_path}/no/x"
    lines = iter([line.format(bad=tmp_path / "bad", other=tmp_path / "other"), "/stats", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr("sys.stdout", Terminal())
    result = draftwood_command("chat", *SHORT)
    assert result.code == 0
    assert message in result.err
    assert "There are no answers yet" in result.err


def test_sampling_and_drafter_change_inside_a_chat(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, "abab\n")
    sampled = draftwood_command("chat", *SHORT, "--temperature", "1.5", "--seed", "4").out
    set_stdin(monkeypatch, "/set temperature 1.5\n/set seed 4\n/drafter\n/drafter plain\nabab\n/stats\n")
    result = draftwood_command("chat", *SHORT)
    assert result.out == sampled
    assert result.err.startswith("temperature 1.5\nseed 4\ndrafter blend\ndrafter plain\n")
    assert "budget 8 · plain" in result.err


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["one\n", "two\n"], ["one", "two"]),
        (['"""\n', "one\n", "\n", "  two\n", '"""\n', "three\n"], ["one\n\n  two", "three"]),
        (['"""one\n', 'two"""\n'], ["one\ntwo"]),
        (['"""one"""\n'], ["one"]),
        (["one\\\n", "two\\\n", "three\n", "four"], ["one\ntwo\nthree", "four"]),
        (['"""\n', "one\n", DISCARD, "two\n"], ["two"]),
        (["one\\\n", DISCARD, "two\n"], ["two"]),
        (['"""\n', "never closed\n"], ["never closed"]),
        (["one\\"], ["one"]),
    ],
)
def test_messages_of_several_lines(lines: list[str], messages: list[str]) -> None:
    assert list(join_lines(iter(lines))) == messages


def test_colours_are_explained_once(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, "abab\nabab\nabab\n")
    result = draftwood_command("chat", "--frequency-penalty=-50", "--color", "always", *SHORT)
    assert result.err.count("copied from the text") == 1


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


def test_inspect_reports_cycle_past_the_end(draftwood_command: Command) -> None:
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
