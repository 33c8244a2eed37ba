"""Tools of the server: requests, grammars and prompts."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest

from draftwood import SamplingParams, Structured
from draftwood.engine import RequestStats, TokenEvent
from draftwood.serve.errors import ApiError
from draftwood.serve.formats import AnswerReaders, SampleOutput
from draftwood.serve.runner import GenerationJob
from draftwood.serve.tools import ToolFormat, ToolReader, bind_answer, encode_chat, format_of, marks_of, parse_tools
from draftwood.serve.tools.formats import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS
from draftwood.serve.tools.messages import explain_tools
from draftwood.text.bytes import BOS, VOCAB_SIZE, ByteTokenizer
from draftwood.tree import DraftTree
from tests.tools.engine import make_llm
from tests.tools.serve import user_message
from tests.tools.structured import compile_for
from tests.tools.tool_calls import NAMED, TIME, TOOLS, WEATHER

CODEC = ByteTokenizer()
ARGS = VOCAB_SIZE  # a further special token
FORMATS = [HERMES, LLAMA, MISTRAL, MISTRAL_ARGS]

# -- requests ----------------------------------------------------------------------------------------------------------


def test_choices() -> None:
    for choice, required, named in [
        (None, False, None),
        ("auto", False, None),
        ("required", True, None),
        (NAMED, True, "get_weather"),
    ]:
        tools = parse_tools({"tools": TOOLS, "tool_choice": choice})
        assert tools is not None
        assert (tools.required, tools.named, tools.parallel) == (required, named, named is None)
    assert parse_tools({"tools": TOOLS, "tool_choice": "none"}) is None
    assert parse_tools({"tools": []}) is None
    assert parse_tools({}) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [WEATHER, {"type": "function", "function": {"name": "a b"}}]}, "tools[1]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0]"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tools": [TIME] * 200}, "tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": "f"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 3}, "parallel_tool_calls"),
    ],
    ids=lambda each: str(each)[:70],
)
def test_mistakes_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_tools(fields)
    assert caught.value.param == param
    assert caught.value.status == 400


# -- formats and grammars ----------------------------------------------------------------------------------------------


def test_the_template_shows_the_format() -> None:
    assert format_of(None) is HERMES
    assert format_of("{{ messages }}") is HERMES
    assert format_of("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert format_of("{% if tools %}[AVAILABLE_TOOLS] [TOOL_CALLS]{% endif %}") is MISTRAL
    assert format_of("{% if tools %}{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}{% endif %}") is MISTRAL_ARGS
    assert format_of("{%- if tools is not none %}<|python_tag|>{% endif %}") is LLAMA
    assert format_of("{{ tools | tojson }}") is HERMES


def write_call(form: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    bodies = [json.dumps({"name": name, form.arguments: arguments}) for name, arguments in calls]
    if form.middle:
        bodies = [f"{name}{form.middle}{json.dumps(arguments)}" for name, arguments in calls]
    return form.start + form.separator.join(f"{form.opening}{body}{form.closing}" for body in bodies) + form.end


def accepts(structured: Structured, text: str) -> bool:
    """Whether the text matches as a whole."""
    matcher = compile_for(CODEC, structured).start()
    ids = CODEC.encode(text, add_special=False)
    return matcher.take(ids) == len(ids) and (matcher.is_complete or matcher.allows(CODEC.eos_token_ids[0]))


OSLO = ("get_weather", {"city": "Oslo", "unit": "kelvin"})
NOW = ("get-time", {})


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_required_calls_match_their_tools(form: ToolFormat) -> None:
    pytest.importorskip("llguidance")
    bound = {}
    for name, more in {"any": {}, "one": {"parallel_tool_calls": False}, "named": {"tool_choice": NAMED}}.items():
        tools = parse_tools({"tools": TOOLS, "tool_choice": "required", **more})
        assert tools is not None
        structured = bind_answer(tools, form, None)
        assert structured is not None
        bound[name] = structured
    assert all(accepts(each, write_call(form, OSLO)) for each in bound.values())
    assert [accepts(each, write_call(form, NOW)) for each in bound.values()] == [True, True, False]
    assert [accepts(each, write_call(form, NOW, OSLO)) for each in bound.values()] == [form.several, False, False]
    for wrong in (("get_weather", {"city": "Bonn", "unit": "kelvin"}), ("other", {}), ("get-time", {"x": 1})):
        assert not accepts(bound["any"], write_call(form, wrong))
    assert not accepts(bound["any"], "Hello.")


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_where_the_model_chooses_calls_of_strict_tools_match(form: ToolFormat) -> None:
    pytest.importorskip("llguidance")
    loose = parse_tools({"tools": [WEATHER]})
    strict = parse_tools({"tools": TOOLS})
    assert loose is not None
    assert strict is not None
    assert bind_answer(loose, form, None) is None
    structured = bind_answer(strict, form, None)
    assert structured is not None
    assert accepts(structured, "Hello, this is text.")
    assert accepts(structured, write_call(form, NOW))
    assert accepts(structured, write_call(form, OSLO, NOW)) is form.several
    assert not accepts(structured, write_call(form, ("get-time", {"x": 1})))
    if form.anywhere:
        assert accepts(structured, "Well.\n" + write_call(form, NOW) + "\nDone.")


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_schema_binds_answers_that_are_no_calls(form: ToolFormat) -> None:
    pytest.importorskip("llguidance")
    tools = parse_tools({"tools": TOOLS})
    assert tools is not None
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    structured = bind_answer(tools, form, Structured(json_schema=schema))
    assert structured is not None
    assert accepts(structured, '{"ok": true}')
    assert accepts(structured, write_call(form, OSLO))
    assert not accepts(structured, "Hello.")
    with pytest.raises(ApiError, match="cannot be combined"):
        bind_answer(tools, form, Structured(regex="a"))


class MarkingTokenizer(ByteTokenizer):
    """Special tokens mark calls."""

    MARKS: ClassVar = {"[TOOL_CALLS]": BOS, "[ARGS]": ARGS}

    vocab_size = ARGS + 1
    special_token_ids = ByteTokenizer.special_token_ids | {ARGS}

    def token_text(self, token_id: int) -> str:
        return "[ARGS]" if token_id == ARGS else super().token_text(token_id)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        if text in self.MARKS:
            return [self.MARKS[text]]
        return super().encode(text, add_special=add_special)


def test_special_tokens_mark_calls() -> None:
    pytest.importorskip("llguidance")
    codec = MarkingTokenizer()
    assert marks_of(MISTRAL, codec) == {"[TOOL_CALLS]": BOS}
    assert marks_of(MISTRAL_ARGS, codec) == MarkingTokenizer.MARKS
    assert marks_of(MISTRAL, CODEC) == marks_of(HERMES, codec) == {}
    now, oslo = (CODEC.encode(name, add_special=False) for name in ("get-time", "get_weather"))
    nothing, city = (CODEC.encode(json.dumps(arguments), add_special=False) for arguments in (NOW[1], OSLO[1]))
    written = {
        MISTRAL: [BOS, *CODEC.encode(write_call(MISTRAL, NOW, OSLO), add_special=False)],
        MISTRAL_ARGS: [BOS, *now, ARGS, *nothing, BOS, *oslo, ARGS, *city],
    }
    for form, ids in written.items():
        for choice in ("required", "auto"):
            tools = parse_tools({"tools": TOOLS, "tool_choice": choice})
            assert tools is not None
            structured = bind_answer(tools, form, None, marks_of(form, codec))
            assert structured is not None
            matcher = compile_for(codec, structured).start()
            assert matcher.take(ids) == len(ids)
            assert matcher.is_complete or matcher.allows(codec.eos_token_ids[0])
            if choice == "required":
                spelled = CODEC.encode(write_call(form, NOW), add_special=False)
                assert compile_for(codec, structured).start().take(spelled) == 0
        text_of = {token: text for text, token in marks_of(form, codec).items()}
        job = GenerationJob((), SamplingParams())
        sample = SampleOutput(0, job, AnswerReaders(calls=ToolReader(form, parallel=True)), text_of)
        texts = tuple("" if token in (BOS, ARGS) else chr(token) for token in ids)
        tree = DraftTree.root_only(0)
        sample.add(TokenEvent(0, tuple(ids), ("target",) * len(ids), texts, (), "stop", RequestStats(), tree, (0,)))
        assert [(call.name, json.loads(call.arguments)) for call in sample.calls] == [NOW, OSLO]
        assert sample.content == ""
        assert sample.finish_reason == "tool_calls"


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_calls_of_a_random_model_are_read(form: ToolFormat) -> None:
    pytest.importorskip("llguidance")
    tools = parse_tools({"tools": TOOLS, "tool_choice": "required"})
    assert tools is not None
    params = SamplingParams(max_tokens=900, temperature=1.0, seed=1, n=4, structured=bind_answer(tools, form, None))
    with make_llm(drafter="goose") as llm:
        for completion in llm.generate("hi", params):
            delta = ToolReader(form, parallel=True).feed(completion.text, is_last=True)
            assert delta.calls
            if completion.finish_reason == "length":
                continue
            assert delta.content == ""
            for call in delta.calls:
                arguments = json.loads(call.arguments)
                assert arguments == {} if call.name == "get-time" else set(arguments) == {"city", "unit"}


# -- conversations -----------------------------------------------------------------------------------------------------

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}},
            {"id": "call_2", "type": "function", "function": {"name": "get-time", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
]


def test_tools_are_explained_where_the_template_does_not_know_them() -> None:
    explained = explain_tools(TALK, TOOLS)
    assert [message["role"] for message in explained] == ["system", "user", "assistant", "user"]
    assert all(set(message) == {"role", "content"} for message in explained)
    assert explained[0]["content"].startswith("Be brief.\n\nYou may call functions")
    assert json.dumps(WEATHER) in explained[0]["content"]
    assert explained[2]["content"].count("<tool_call>") == 2
    reader = ToolReader(HERMES, parallel=True)
    assert [call.name for call in reader.feed(explained[2]["content"], is_last=True).calls] == [
        "get_weather",
        "get-time",
    ]
    responses = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    assert explained[3]["content"] == responses
    assert explain_tools(user_message("hi"), TOOLS)[0]["role"] == "system"
    assert explain_tools(user_message("hi"), []) == user_message("hi")
    assert "get_weather" in CODEC.decode(encode_chat(CODEC, TALK, TOOLS))


class TemplateCodec(ByteTokenizer):
    """A codec whose template knows tools."""

    tool_template = "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:{{ m.tool_calls | tojson }}{% endfor %}"  # type: ignore[assignment]
    seen: Any = None

    def apply_chat(self, messages: Any, add_generation_prompt: bool = True, tools: Any = None) -> list[int]:
        self.seen = messages, tools
        return [1]


def test_templates_that_know_tools_get_them_unchanged() -> None:
    codec = TemplateCodec()
    encode_chat(codec, TALK, TOOLS)
    assert codec.seen == (TALK, TOOLS)
    encode_chat(codec, TALK, [])
    assert codec.seen == (TALK, None)


def test_templates_render_tools() -> None:
    """As real templates do: they are given as JSON, and arguments as objects."""
    from draftwood.text.chat import render_chat

    template = (
        "{%- for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
        "{%- for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}"
    )
    assert render_chat(template, TALK, {}, True, TOOLS) == 'get_weather;get-time;{"city": "Oslo"}{}'
    assert render_chat(template, TALK, {}, True) == '{"city": "Oslo"}{}'
