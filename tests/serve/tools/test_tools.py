"""Tools of the server: requests, prompts, grammars, and OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from draftwood import SamplingParams, Structured
from draftwood.serve.errors import ApiError
from draftwood.serve.tools import ToolFormat, ToolReader, bind_answer, encode_chat, format_of, mark_of, parse_tools
from draftwood.serve.tools.formats import HERMES, LLAMA, MISTRAL
from draftwood.serve.tools.messages import explain_tools
from draftwood.text.bytes import BOS, ByteTokenizer
from tests.tools.engine import make_llm
from tests.tools.serve import NAME, Running, serving, user_message
from tests.tools.structured import compile_for

CODEC = ByteTokenizer()
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "$defs": {"unit": {"enum": ["celsius", "kelvin"]}},
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "unit": {"$ref": "#/$defs/unit"}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get-time", "strict": True}}
TOOLS = [WEATHER, TIME]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
FORMATS = [HERMES, LLAMA, MISTRAL]

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
    assert format_of("{%- if tools is not none %}<|python_tag|>{% endif %}") is LLAMA
    assert format_of("{{ tools | tojson }}") is HERMES


def write_call(form: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    bodies = [json.dumps({"name": name, form.arguments: arguments}) for name, arguments in calls]
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
    """A special token marks calls."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [BOS] if text == MISTRAL.mark else super().encode(text, add_special=add_special)


def test_a_special_token_marks_calls() -> None:
    pytest.importorskip("llguidance")
    codec = MarkingTokenizer()
    assert mark_of(MISTRAL, codec) == BOS
    assert mark_of(MISTRAL, CODEC) is None
    assert mark_of(HERMES, codec) is None
    for choice in ("required", "auto"):
        tools = parse_tools({"tools": TOOLS, "tool_choice": choice})
        assert tools is not None
        structured = bind_answer(tools, MISTRAL, None, mark_of(MISTRAL, codec))
        assert structured is not None
        matcher = compile_for(codec, structured).start()
        ids = [BOS, *CODEC.encode(write_call(MISTRAL, NOW, OSLO), add_special=False)]
        assert matcher.take(ids) == len(ids)
        assert matcher.is_complete
        assert not accepts(structured, write_call(MISTRAL, NOW))


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


# -- the server --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    pytest.importorskip("llguidance")
    with serving(drafter="goose") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_streamed_calls_are_the_same(client: openai.OpenAI, choice: Any, seed: int) -> None:
    fields: dict[str, Any] = {
        "model": NAME,
        "messages": user_message("Weather in Oslo?"),
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": seed != 3,
        "seed": seed,
        "max_tokens": 600,
    }
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    assert whole.message.tool_calls
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert seed != 3 or len(calls) == 1
    for name, arguments in calls:
        assert json.loads(arguments) == {} if name == "get-time" else "city" in json.loads(arguments)
    streamed: list[list[str]] = []
    reasons = []
    for part in client.chat.completions.create(**fields, stream=True):
        reasons.append(part.choices[0].finish_reason)
        for call in part.choices[0].delta.tool_calls or []:
            if call.id:
                assert call.type == "function"
                assert call.function is not None
                assert call.index == len(streamed)
                streamed.append([call.function.name or "", ""])
            streamed[call.index][1] += (call.function and call.function.arguments) or ""
    assert [tuple(call) for call in streamed] == calls
    assert reasons[-1] == "tool_calls"


def test_the_clients_own_stream_and_parser(client: openai.OpenAI) -> None:
    class City(BaseModel):
        name: str

    tool = openai.pydantic_function_tool(City)
    tool["function"]["parameters"]["properties"]["name"] = {"enum": ["Oslo", "Rome"]}  # type: ignore[index]
    fields: dict[str, Any] = {"model": NAME, "messages": user_message("hi"), "tools": [tool], "tool_choice": "required"}
    found = client.chat.completions.parse(**fields, parallel_tool_calls=False).choices[0].message
    assert found.tool_calls
    assert isinstance(found.tool_calls[0].function.parsed_arguments, City)
    with client.chat.completions.stream(**fields, parallel_tool_calls=False) as stream:
        stream.until_done()
        message = stream.get_final_completion().choices[0].message
        assert message.tool_calls
        assert isinstance(message.tool_calls[0].function.parsed_arguments, City)


def test_a_conversation_goes_on_with_the_results(client: openai.OpenAI) -> None:
    messages: list[Any] = user_message("Weather in Oslo?")
    first = client.chat.completions.create(model=NAME, messages=messages, tools=TOOLS, tool_choice=NAMED)  # type: ignore[arg-type]
    assert first.choices[0].message.tool_calls
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    for call in first.choices[0].message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    for more in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=5, **more)  # type: ignore[call-overload]
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.tool_calls is None


def test_a_call_or_an_answer_within_a_schema(server: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    kinds = set()
    for seed in range(6):
        found = server.chat(
            tools=[WEATHER], response_format=response_format, seed=seed, temperature=2.0, max_tokens=800
        )
        (choice,) = found.body["choices"]
        kinds.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) == {"ok"}
    assert {"stop", "tool_calls"} <= kinds


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "regex"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objct"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [{}]}]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "rain"}]}, "messages[0]"),
        ({"messages": [{"role": "function", "content": "rain"}]}, "messages[0]"),
        ({"tools": [{**TIME, "padding": "x" * 100_000}]}, "tools"),
    ],
    ids=lambda each: str(each)[:70],
)
def test_invalid_requests_are_rejected(server: Running, fields: dict[str, Any], param: str) -> None:
    found = server.chat(**fields)
    assert (found.status, found.error["param"]) == (400, param)
    assert "Traceback" not in found.text


def test_completions_have_no_tools(server: Running) -> None:
    found = server.request("/v1/completions", {"prompt": "a", "tools": TOOLS})
    assert (found.status, found.error["param"]) == (400, "tools")


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
