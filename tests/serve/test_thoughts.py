"""Models that think before their answer: a structure binds what follows, and the response has both apart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood import Structured
from draftwood.serve.thoughts import CLOSE, OPEN, Thinking, ThoughtReader, bind_after_thoughts, thinking_of
from draftwood.text.bytes import BOS, ByteTokenizer
from draftwood.text.chat import Message, Tool
from tests.tools.serve import Running, serving
from tests.tools.structured import compile_for

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["oak", "ash"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "tree", "schema": SCHEMA, "strict": True}}


class ThinkingTokenizer(ByteTokenizer):
    """Its template begins the thoughts of an answer, unless the last message says otherwise."""

    tool_template = f"{{{{ messages }}}}{OPEN}{CLOSE}"

    def apply_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, tools: Sequence[Tool] | None = None
    ) -> list[int]:
        begin = {"do not": f"{OPEN}\n\n{CLOSE}\n\n", "you may": ""}.get(messages[-1]["content"], f"{OPEN}\n")
        return [*super().apply_chat(messages), *begin.encode()]


class MarkingTokenizer(ThinkingTokenizer):
    """The end of thoughts is a special token."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [BOS] if text == CLOSE else super().encode(text, add_special=add_special)


CODEC = ThinkingTokenizer()

# -- prompts and grammars ----------------------------------------------------------------------------------------------


def test_the_prompt_shows_whether_the_model_thinks() -> None:
    for text, thinking in {"do": "begun", "do not": "no", "you may": "may"}.items():
        messages = [{"role": "user", "content": text}]
        assert thinking_of(CODEC.apply_chat(messages), CODEC) == thinking
        assert thinking_of(ByteTokenizer().apply_chat(messages), ByteTokenizer()) == "no"


STRUCTURES = [
    (Structured(json_schema=SCHEMA), '{"kind": "oak"}', '{"kind": "elm"}'),
    (Structured(regex="a/b\\/c\n(d|e)"), "a/b/c\nd", "a/b/c\nf"),
    (Structured(grammar='start: "x" rest\nrest: "{" | "y"'), "x{", "xx"),
]


@pytest.mark.parametrize(("structured", "good", "bad"), STRUCTURES, ids=lambda each: getattr(each, "kind", None))
def test_a_structure_binds_what_follows_the_thoughts(structured: Structured, good: str, bad: str) -> None:
    pytest.importorskip("llguidance")

    def accepts(thinking: Thinking, text: str) -> bool:
        matcher = compile_for(CODEC, bind_after_thoughts(structured, thinking, CODEC)).start()
        ids = text.encode()
        return matcher.take(ids) == len(ids) and (matcher.is_complete or matcher.allows(CODEC.eos_token_ids[0]))

    thoughts = f'An {{"oak"\n\n"?<think> </thin{CLOSE}'
    assert accepts("begun", thoughts + good)
    assert accepts("begun", f"{CLOSE}\n\n{good}")
    assert accepts("may", OPEN + thoughts + good)
    assert accepts("may", good)
    assert accepts("no", good)
    for thinking, text in [("begun", good), ("may", thoughts + good), ("no", OPEN + thoughts + good)]:
        assert not accepts(thinking, text)  # type: ignore[arg-type]
    assert not accepts("begun", thoughts + bad)
    assert not accepts("begun", f"{thoughts}\n\n\n{good}")  # no endless blanks


# -- reading -----------------------------------------------------------------------------------------------------------

CASES: list[tuple[Thinking, str, str, str]] = [
    ("begun", f"\nhm </thi{CLOSE}\n\nYes.\n", "\nhm </thi", "Yes.\n"),
    ("begun", "no end </thin", "no end </thin", ""),
    ("begun", f"{CLOSE}{CLOSE} a", "", f"{CLOSE} a"),
    ("may", f" \n{OPEN}a{CLOSE} b {OPEN}c{CLOSE}", "a", f"b {OPEN}c{CLOSE}"),
    ("may", f" text {OPEN}a{CLOSE}", "", f" text {OPEN}a{CLOSE}"),
    ("may", "<thi", "", "<thi"),
    ("may", "", "", ""),
]


@given(st.sampled_from(CASES), st.lists(st.integers(1, 9), max_size=20))
def test_thoughts_are_split_however_the_text_is_cut(case: tuple[Thinking, str, str, str], sizes: list[int]) -> None:
    thinking, text, thoughts, rest = case
    parts = []
    for size in sizes:
        parts.append(text[:size])
        text = text[size:]
    reader = ThoughtReader(thinking)
    found = [reader.feed(part, is_last=False) for part in parts] + [reader.feed(text, is_last=True)]
    assert "".join(part.thoughts for part in found) == thoughts
    assert "".join(part.rest for part in found) == rest


# -- the server --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    pytest.importorskip("llguidance")
    with serving(codec=MarkingTokenizer(), drafter="goose") as running:
        yield running


def ask(server: Running, text: str = "think", **fields: Any) -> dict[str, Any]:
    """The mark that ends thoughts is made likely."""
    asked = {"messages": [{"role": "user", "content": text}], "logit_bias": {str(BOS): 7}, "max_tokens": 200, "seed": 5}
    found: dict[str, Any] = server.chat(**{"response_format": FORMAT, **asked, **fields}).body
    return found


def test_an_answer_matches_its_schema_after_the_thoughts(server: Running) -> None:
    choice = ask(server)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"])["kind"] in ("oak", "ash")
    assert choice["message"]["reasoning_content"]
    assert CLOSE not in choice["message"]["reasoning_content"]


def test_streams_have_thoughts_in_deltas_of_their_own(server: Running) -> None:
    whole = ask(server)["choices"][0]["message"]
    asked = {"messages": [{"role": "user", "content": "think"}], "logit_bias": {str(BOS): 7}, "max_tokens": 200}
    text = server.chat(**asked, seed=5, response_format=FORMAT, stream=True).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == whole[name]


def test_thoughts_stay_in_the_answer_if_asked_for(server: Running) -> None:
    apart, within = (ask(server, reasoning_format=form)["choices"][0]["message"] for form in ("auto", "none"))
    thoughts, answer = apart["reasoning_content"], apart["content"]
    assert within["content"] in (thoughts + gap + answer for gap in ("", "\n", "\n\n"))  # the mark is a special token
    assert "reasoning_content" not in within
    assert server.chat(reasoning_format="other").error["param"] == "reasoning_format"


def test_a_prompt_without_thoughts_is_bound_at_once(server: Running) -> None:
    message = ask(server, "do not")["choices"][0]["message"]
    assert json.loads(message["content"])["kind"] in ("oak", "ash")
    assert "reasoning_content" not in message


def test_thoughts_without_a_schema(server: Running) -> None:
    message = ask(server, response_format=None, max_tokens=60)["choices"][0]["message"]
    assert message["reasoning_content"]


def test_other_apis_leave_thoughts_out(server: Running) -> None:
    asked = {"logit_bias": {str(BOS): 7}, "seed": 5}
    text = {"format": {"type": "json_schema", "name": "tree", "schema": SCHEMA}}
    found = server.request("/v1/responses", {"input": "think", "text": text, "max_output_tokens": 200, **asked}).body
    (item,) = found["output"]
    assert json.loads(item["content"][0]["text"])["kind"] in ("oak", "ash")
