"""Tools through a running server and OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.tools.serve import NAME, Running, serving, user_message
from tests.tools.tool_calls import NAMED, TIME, TOOLS, WEATHER


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
        answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=5, seed=1, **more)  # type: ignore[call-overload]
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
