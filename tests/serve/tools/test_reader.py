"""Calls in the text of an answer: found in every format, however the text is cut into parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.serve.tools import ToolFormat, ToolReader
from draftwood.serve.tools.formats import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS

Calls = list[tuple[str, str]]
ARGUMENTS = '{"a": "}{\\"]</x>", "b": [1, {"c": 2}]}'
CASES: list[tuple[ToolFormat, str, str, Calls]] = [
    (HERMES, "just text <tool and more\n\n", "just text <tool and more\n\n", []),
    (HERMES, f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>', "", [("f", ARGUMENTS)]),
    (
        HERMES,
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>{"name":"g","arguments":{"x":1}}</tool_call>\n',
        "Let me see.",
        [("f", "{}"), ("g", '{"x":1}')],
    ),
    (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call> and more', "and more", [("f", '{"x": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
    (HERMES, "a <tool_call>nonsense</tool_call> b", "a <tool_call>nonsense</tool_call> b", []),
    (HERMES, 'a <tool_call>\n{"name": "f", "arg', 'a <tool_call>\n{"name": "f", "arg', []),
    (HERMES, 'a <tool_call>\n{"name": "f", "arguments": {"x": "abc', "a", [("f", '{"x": "abc')]),
    (LLAMA, f'{{"name": "f", "parameters": {ARGUMENTS}}}', "", [("f", ARGUMENTS)]),
    (LLAMA, '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    (LLAMA, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", [("f", "{}"), ("g", "{}")]),
    (LLAMA, '{"name": "f", "parameters": {}} done', "done", [("f", "{}")]),
    (LLAMA, '{"answer": 3} is it', '{"answer": 3} is it', []),
    (LLAMA, ' Hello {"name": "f", "parameters": {}}', ' Hello {"name": "f", "parameters": {}}', []),
    (LLAMA, "<|pyth", "<|pyth", []),
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}]', "", [("f", ARGUMENTS)]),
    (MISTRAL, '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "", [("f", "{}"), ("g", "{}")]),
    (MISTRAL, '[{"name": "f", "arguments": {}}] tail', "tail", [("f", "{}")]),
    (MISTRAL, "[1, 2]", "[1, 2]", []),
    (MISTRAL, '[{"a": 2}]', '[{"a": 2}]', []),
    (MISTRAL, "[a link](url)", "[a link](url)", []),
    (MISTRAL_ARGS, f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}", "", [("f", ARGUMENTS)]),
    (MISTRAL_ARGS, "Well. [TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g{}\nEnd.", "Well.End.", [("f", "{}"), ("g", "{}")]),
    (MISTRAL_ARGS, '[TOOL_CALLS]f[CALL_ID]a1b2[ARGS]{"x": 1}', "", [("f", '{"x": 1}')]),
    (MISTRAL_ARGS, "[TOOL_CALLS]no call", "[TOOL_CALLS]no call", []),
    (MISTRAL_ARGS, "[TOOL_CALLS]" + 30 * "words " + "{}", "[TOOL_CALLS]" + 30 * "words " + "{}", []),
    (MISTRAL_ARGS, "a [TOOL_CALLS]b c[TOOL_CALLS]f[ARGS]{}", "a [TOOL_CALLS]b c", [("f", "{}")]),
    (MISTRAL_ARGS, "text [TOOL", "text [TOOL", []),
]


def read(form: ToolFormat, parts: list[str], *, parallel: bool = True) -> tuple[str, Calls]:
    reader, content, calls = ToolReader(form, parallel=parallel), "", Calls()
    for index, part in enumerate(parts):
        delta = reader.feed(part, is_last=index == len(parts) - 1)
        content += delta.content
        for call in delta.calls:
            if call.name:
                assert call.call_id
                assert call.place == len(calls)
                calls.append((call.name, ""))
            calls[call.place] = calls[call.place][0], calls[call.place][1] + call.arguments
    assert reader.num_calls == len(calls)
    return content, calls


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_found(form: ToolFormat, text: str, content: str, calls: Calls) -> None:
    assert read(form, [text]) == (content, calls)
    assert read(form, list(text)) == (content, calls)
    assert read(form, [text], parallel=False) == (content, calls[:1])


@given(st.sampled_from(CASES), st.lists(st.integers(1, 12), min_size=1, max_size=30))
def test_parts_do_not_matter(case: tuple[ToolFormat, str, str, Calls], sizes: list[int]) -> None:
    form, text, content, calls = case
    parts, rest = [], text
    for size in sizes:
        parts.append(rest[:size])
        rest = rest[size:]
    assert read(form, [*parts, rest]) == (content, calls)


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[",
    "]",
    "{",
    "}",
    '"name"',
    '"f"',
    ":",
    ",",
    '"arguments"',
    " x\n",
]


@given(st.sampled_from([HERMES, LLAMA, MISTRAL, MISTRAL_ARGS]), st.lists(st.sampled_from(PIECES), max_size=24))
def test_any_text_is_read_the_same_in_parts(form: ToolFormat, pieces: list[str]) -> None:
    text = "".join(pieces)
    assert read(form, [text]) == read(form, [*text, ""]) == read(form, [*pieces, ""])


def test_ids_are_those_that_templates_accept() -> None:
    assert len(MISTRAL.new_id()) == 9
    assert MISTRAL.new_id().isalnum()
    assert HERMES.new_id().startswith("call_")
