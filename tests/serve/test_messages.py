"""POST /v1/messages, with Anthropic's client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from draftwood import SamplingParams
from tests.tools.serve import NAME, Running, serving, user_message

anthropic = pytest.importorskip("anthropic")

TOKENS = 24


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving({"api_keys": ("right",)}, drafter="goose") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="right", max_retries=0)


def ask(server: Running, path: str = "/v1/messages", **fields: Any) -> Any:
    body = {"model": NAME, "max_tokens": 4, "messages": user_message("a"), **fields}
    return server.request(path, body, {"x-api-key": "right"})


def test_a_message_has_the_output_of_the_library(server: Running, client: Any) -> None:
    system = {"role": "system", "content": "be brief"}
    expected = server.llm.chat([system, *user_message("hello")], SamplingParams(max_tokens=TOKENS))[0]
    for given in ("be brief", [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]):
        found = client.messages.create(
            model=NAME, system=given, messages=user_message("hello"), max_tokens=TOKENS, extra_body={"temperature": 0}
        )
        (block,) = found.content
        assert (block.type, block.text) == ("text", expected.text)
        assert (found.role, found.stop_reason, found.stop_sequence) == ("assistant", "max_tokens", None)
        assert found.usage.output_tokens == TOKENS
        assert found.usage.input_tokens + found.usage.cache_read_input_tokens == expected.stats.prompt_tokens
    assert found.usage.cache_read_input_tokens > 0


def test_a_stream_has_anthropics_events(client: Any) -> None:
    fields: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "the cat sat on"}]}],
        "max_tokens": TOKENS,
        "extra_body": {"seed": 5, "ignore_eos": True},
    }
    whole = client.messages.create(**fields)
    events = list(client.messages.create(**fields, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert "".join(event.delta.text for event in events[2:-3]) == whole.content[0].text
    assert events[-2].usage.output_tokens == TOKENS
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", TOKENS)


def test_stop_sequences(server: Running, client: Any) -> None:
    text = server.llm.chat(user_message("hello"), SamplingParams(max_tokens=TOKENS))[0].text
    stop = text[6:8]
    found = client.messages.create(
        model=NAME,
        messages=user_message("hello"),
        max_tokens=TOKENS,
        stop_sequences=["~~~", stop],
        extra_body={"temperature": 0},
    )
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == text[: text.index(stop)]
    eos = server.llm.info.eos_token_ids[0]
    ended = ask(server, logit_bias={str(eos): 100}, temperature=0, stop_sequences=["~~~"]).body
    assert (ended["stop_reason"], ended["stop_sequence"], ended["content"][0]["text"]) == ("end_turn", None, "")


def test_counting_tokens(server: Running, client: Any) -> None:
    found = client.messages.count_tokens(model=NAME, system="be brief", messages=user_message("hello"))
    prompt = [{"role": "system", "content": "be brief"}, *user_message("hello")]
    assert found.input_tokens == len(server.llm.tokenizer.apply_chat(prompt))
    assert ask(server, "/v1/messages/count_tokens", messages=[]).status == 400


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "id of the call"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "name of a function"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "function"),
        ({"tools": [{"name": "a b"}]}, "name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"system": 3}, "content"),
        ({"temperature": "warm"}, "temperature"),
        ({"stop_sequences": [""]}, "stop"),
    ],
    ids=str,
)
def test_errors_have_anthropics_format(server: Running, fields: dict[str, Any], word: str) -> None:
    found = ask(server, **fields)
    assert (found.status, found.body["type"]) == (400, "error")
    assert found.error["type"] == "invalid_request_error"
    assert word in found.error["message"]


def test_errors_of_the_client(server: Running, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="Unknown model"):
        client.messages.create(model="another", messages=user_message("a"), max_tokens=4)
    wrong = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(model=NAME, messages=user_message("a"), max_tokens=4)
    assert ask(server, path="/v1/messages/nothing").body["error"]["type"] == "not_found_error"


WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def test_calls_of_tools(client: Any) -> None:
    pytest.importorskip("llguidance")
    messages: list[Any] = user_message("hi")
    fields: dict[str, Any] = {"model": NAME, "tools": [WEATHER], "max_tokens": 200, "extra_body": {"temperature": 0}}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}):
        found = client.messages.create(messages=messages, tool_choice=choice, **fields)
        (block,) = found.content
        assert (block.type, block.name, found.stop_reason) == ("tool_use", "get_weather", "tool_use")
        assert block.input["city"] in ("Oslo", "Rome")
    with client.messages.stream(messages=messages, tool_choice=choice, **fields) as stream:
        final = stream.get_final_message()
    assert (final.content[0].name, final.content[0].input) == (block.name, block.input)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "rain"}]}
    messages += [{"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
    again = client.messages.create(messages=messages, model=NAME, max_tokens=8, tools=[WEATHER])
    assert again.usage.output_tokens == 8
    counted = client.messages.count_tokens(model=NAME, messages=messages, tools=[WEATHER]).input_tokens
    assert counted == again.usage.input_tokens + again.usage.cache_read_input_tokens


def test_fields_of_agents_without_effect(server: Running) -> None:
    found = ask(server, metadata={"user_id": "me"}, thinking={"type": "disabled"})
    assert found.status == 200
    assert "x-draftwood-warning" not in found.headers
