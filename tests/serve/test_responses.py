"""POST /v1/responses, with OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from draftwood import SamplingParams
from tests.tools.serve import NAME, Running, eventually, serving, user_message

openai = pytest.importorskip("openai")

TOKENS = 24


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(drafter="goose") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def test_a_response_has_the_output_of_the_library(server: Running, client: Any) -> None:
    expected = server.llm.chat(user_message("hello"), SamplingParams(max_tokens=TOKENS))[0]
    found = client.responses.create(model=NAME, input="hello", temperature=0, max_output_tokens=TOKENS)
    assert found.output_text == expected.text
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.usage.input_tokens == expected.stats.prompt_tokens
    assert found.usage.output_tokens == TOKENS
    assert found.usage.total_tokens == found.usage.input_tokens + TOKENS
    assert found.draftwood["passes"] >= 1
    (item,) = found.output
    assert (item.type, item.role) == ("message", "assistant")


def test_conversations_and_instructions(server: Running, client: Any) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    expected = server.llm.chat(messages, SamplingParams(max_tokens=TOKENS))[0].text
    parts = {
        "user": lambda text: [{"type": "input_text", "text": text}],
        "assistant": lambda text: [{"type": "output_text", "text": text}],
    }
    items = [{**each, "type": "message", "content": parts[each["role"]](each["content"])} for each in messages[1:]]
    for given in (items, messages[1:]):
        found = client.responses.create(
            model=NAME, instructions="be brief", input=given, temperature=0, max_output_tokens=TOKENS
        )
        assert found.output_text == expected
        assert found.instructions == "be brief"


def test_the_answer_can_be_sent_back(client: Any) -> None:
    """As documented for clients that keep the conversation themselves."""
    first = client.responses.create(model=NAME, input="one", temperature=0, max_output_tokens=8)
    items = [*user_message("one"), *[item.model_dump() for item in first.output], *user_message("two")]
    again = client.responses.create(model=NAME, input=items, temperature=0, max_output_tokens=8)
    assert again.output_text
    assert again.usage.input_tokens_details.cached_tokens > 0


def test_a_stream_has_openais_events(client: Any) -> None:
    fields: dict[str, Any] = {"model": NAME, "input": "the cat sat on", "seed": 5, "max_output_tokens": TOKENS}
    fields["extra_body"] = {"seed": fields.pop("seed"), "ignore_eos": True}
    whole = client.responses.create(**fields)
    events = list(client.responses.create(**fields, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text == events[-4].text
    assert events[-1].response.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert len({event.item_id for event in events[3:-2]}) == 1


def test_a_complete_response(server: Running, client: Any) -> None:
    text = server.llm.chat(user_message("hello"), SamplingParams(max_tokens=TOKENS))[0].text
    fields: dict[str, Any] = {"model": NAME, "input": "hello", "temperature": 0, "extra_body": {"stop": text[4:6]}}
    found = client.responses.create(**fields)
    assert (found.status, found.output_text, found.incomplete_details) == (
        "completed",
        text[: text.index(text[4:6])],
        None,
    )
    events = list(client.responses.create(**fields, stream=True))
    assert (events[-1].type, events[-1].response.status) == ("response.completed", "completed")
    with client.responses.stream(**fields) as stream:  # the client's own accumulation
        assert stream.get_final_response().output_text == found.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "3"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"text": {"format": {"type": "xml"}}}, "response_format"),
        ({"text": 3}, "text"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_tokens"),
        ({"instructions": 3}, "instructions"),
        ({"drafter": "nobody"}, "drafter"),
    ],
    ids=str,
)
def test_wrong_fields(server: Running, fields: dict[str, Any], param: str) -> None:
    found = server.request("/v1/responses", {"model": NAME, "input": "a", **fields})
    assert (found.status, found.error["param"]) == (400, param)


def test_fields_without_effect(client: Any) -> None:
    found = client.responses.create(
        model=NAME,
        input="a",
        max_output_tokens=2,
        store=False,
        metadata={"a": "b"},
        tools=[],
        tool_choice="auto",
        reasoning={"effort": "low"},
        text={"format": {"type": "text"}},
        truncation="disabled",
        parallel_tool_calls=False,
    )
    assert found.metadata == {"a": "b"}


def test_an_error_during_a_stream(server: Running, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = server.llm.engine.step, []

    def broken(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            monkeypatch.undo()
            raise RuntimeError("a secret")
        step(*args)

    monkeypatch.setattr(server.llm.engine, "step", broken)
    fields = {"input": "a", "max_output_tokens": 200, "stream": True, "drafter": "plain", "ignore_eos": True}
    text = server.request("/v1/responses", fields).text
    assert "event: error\n" in text
    assert "event: response.failed\n" in text
    assert "secret" not in text
    assert eventually(lambda: not server.llm.engine.has_work)


WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def test_calls_of_tools(client: Any) -> None:
    pytest.importorskip("llguidance")
    fields: dict[str, Any] = {"model": NAME, "input": "hi", "tools": [WEATHER], "temperature": 0}
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        found = client.responses.create(**fields, tool_choice=choice, parallel_tool_calls=False)
        (call,) = found.output
        assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
        assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    events = list(client.responses.create(**fields, tool_choice=choice, stream=True))
    kinds = [event.type for event in events]
    assert kinds[2] == "response.output_item.added"
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments == events[-3].arguments
    assert events[-1].response.output[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    again = client.responses.create(
        model=NAME, input=[*user_message("hi"), call.model_dump(), result], tools=[WEATHER], max_output_tokens=8
    )
    assert again.usage.output_tokens == 8


def test_answers_that_match_a_schema(client: Any) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    found = client.responses.create(model=NAME, input="hi", text={"format": form})
    assert json.loads(found.output_text)["ok"] in (True, False)
    assert found.status == "completed"
