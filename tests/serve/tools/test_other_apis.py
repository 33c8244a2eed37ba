"""Tools in OpenAI's responses and in Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from draftwood.serve.conversations import parse_anthropic, parse_input
from draftwood.serve.requests import RequestLimits
from tests.tools.serve import NAME, Running, serving, user_message

LIMITS = RequestLimits(context_length=512, drafters=["plain"])
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
OPENAI_TOOLS = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}]
ANTHROPIC_TOOLS = [{"name": "get_weather", "description": "of a city", "input_schema": SCHEMA}]


class City(BaseModel):
    large: bool


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    pytest.importorskip("llguidance")
    with serving(drafter="goose") as running:
        yield running


# -- requests ----------------------------------------------------------------------------------------------------------


CALLS = [
    {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}},
    {"id": "b", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}},
]
EXPECTED = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "a", "content": "rain"},
    {"role": "tool", "tool_call_id": "b", "content": "sun"},
    {"role": "user", "content": "Thanks."},
]


def test_conversations_of_responses() -> None:
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "b", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "sun"}]},
        {"role": "user", "content": "Thanks."},
    ]
    assert parse_input({"input": items}, LIMITS) == EXPECTED


def test_conversations_of_messages() -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "b", "name": "get_weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "rain"},
                {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "sun"}]},
                {"type": "text", "text": "Thanks."},
            ],
        },
    ]
    assert parse_anthropic({"messages": messages}, LIMITS) == EXPECTED
    del messages[2]["content"][2]  # type: ignore[attr-defined]
    assert parse_anthropic({"messages": messages}, LIMITS) == EXPECTED[:-1]


# -- OpenAI's responses ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.mark.parametrize("parallel", [False, True])
def test_responses_with_calls(client: openai.OpenAI, parallel: bool) -> None:
    fields: dict[str, Any] = {
        "model": NAME,
        "input": "Weather in Oslo?",
        "tools": OPENAI_TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": parallel,
        "max_output_tokens": 600,
        "extra_body": {"seed": 3},
    }
    whole = client.responses.create(**fields)
    assert {item.type for item in whole.output} == {"function_call"}
    calls = [(item.name, item.arguments) for item in whole.output]  # type: ignore[union-attr]
    assert parallel or len(calls) == 1
    assert all(set(json.loads(arguments)) == {"city"} for _, arguments in calls)
    events = list(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [arguments for _, arguments in calls]
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    for place, (_, arguments) in enumerate(calls):
        assert "".join(event.delta for event in deltas if event.output_index == place) == arguments
    assert events[-1].type == "response.completed"
    assert [(item.name, item.arguments) for item in events[-1].response.output] == calls  # type: ignore[union-attr]
    with client.responses.stream(**fields) as stream:  # the client's own accumulation
        final = stream.get_final_response()
    assert [(item.name, item.arguments) for item in final.output] == calls  # type: ignore[union-attr]


def test_a_response_goes_on_with_results(client: openai.OpenAI) -> None:
    named = {"type": "function", "name": "get_weather"}
    items: list[Any] = user_message("Weather in Oslo?")
    first = client.responses.create(model=NAME, input=items, tools=OPENAI_TOOLS, tool_choice=named)  # type: ignore[call-overload]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"type": "function_call_output", "call_id": first.output[0].call_id, "output": "rain"})
    again = client.responses.create(
        model=NAME, input=items, tools=OPENAI_TOOLS, tool_choice="none", max_output_tokens=5
    )  # type: ignore[call-overload]
    assert [item.type for item in again.output] == ["message"]


def test_responses_within_a_schema(client: openai.OpenAI) -> None:
    found = client.responses.parse(model=NAME, input="Oslo", text_format=City)
    assert isinstance(found.output_parsed, City)


def test_a_wrong_schema_of_a_response_is_the_clients_error(server: Running) -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"type": "objct"}, "strict": True}
    found = server.request("/v1/responses", {"model": NAME, "input": "a", "text": {"format": form}})
    assert (found.status, found.error["param"]) == (400, "text")


# -- Anthropic's messages ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def anthropic_client(server: Running) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.mark.parametrize("single", [True, False])
def test_messages_with_calls(anthropic_client: Any, single: bool) -> None:
    fields: dict[str, Any] = {
        "model": NAME,
        "messages": user_message("Weather in Oslo?"),
        "tools": ANTHROPIC_TOOLS,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": single},
        "max_tokens": 600,
        "extra_body": {"seed": 3},
    }
    whole = anthropic_client.messages.create(**fields)
    assert whole.stop_reason == "tool_use"
    assert {block.type for block in whole.content} == {"tool_use"}
    assert not single or len(whole.content) == 1
    assert all(set(block.input) == {"city"} for block in whole.content)
    with anthropic_client.messages.stream(**fields) as stream:  # the client's own accumulation
        final = stream.get_final_message()
    assert [(block.name, block.input) for block in final.content] == [(b.name, b.input) for b in whole.content]
    assert final.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "rain"} for block in whole.content]
    messages = [
        *fields["messages"],
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in whole.content]},
        {"role": "user", "content": results},
    ]
    fields |= {"messages": messages, "tool_choice": {"type": "none"}, "max_tokens": 4}
    assert anthropic_client.messages.create(**fields).content[0].type == "text"


def test_messages_by_hand(server: Running) -> None:
    """Without Anthropic's client: blocks, their order in a stream, and the count of the prompt."""
    body = {
        "model": NAME,
        "messages": user_message("Weather?"),
        "tools": ANTHROPIC_TOOLS,
        "tool_choice": {"type": "tool", "name": "get_weather"},
        "max_tokens": 300,
        "seed": 1,
    }
    (block,) = server.request("/v1/messages", body).body["content"]
    assert (block["type"], block["name"], set(block["input"])) == ("tool_use", "get_weather", {"city"})
    text = server.request("/v1/messages", {**body, "stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    parts = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert json.loads("".join(parts)) == block["input"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    counts = [
        server.request("/v1/messages/count_tokens", {"model": NAME, "messages": user_message("a"), **more}).body
        for more in ({}, {"tools": ANTHROPIC_TOOLS})
    ]
    assert counts[1]["input_tokens"] > counts[0]["input_tokens"] + 100
