"""Other programs in front of the server: LangChain's chat model, and what Open WebUI sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests.tools.serve import NAME, Running, serving, user_message

KEY = "sk-front"
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving({"api_keys": (KEY,), "names": (NAME,)}) as running:
        yield running


def read_events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_open_webui_lists_the_models(server: Running) -> None:
    """A GET without a body; the list is read from ``data``, and each ``id`` is what chats name."""
    found = server.request("/v1/models", headers={"Authorization": f"Bearer {KEY}"}).body
    assert [model["id"] for model in found["data"]] == [NAME]
    assert server.request("/v1/models", headers={"Authorization": "Bearer wrong"}).status == 401


def test_open_webui_chats(server: Running) -> None:
    """The fields of its settings, a system prompt, content in parts, and usage in the last chunk."""
    body = {
        "stream": True,
        "model": NAME,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "And now?"},
        ],
        "stream_options": {"include_usage": True},
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 3, "max_tokens": 8, "stop": ["zzzz"],
        "frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": {"5": -100}, "reasoning_effort": "low",
        # Of its settings for other engines, which it sends along:
        "num_ctx": 4096, "repeat_penalty": 1.1, "keep_alive": "5m", "think": True,
    }  # fmt: skip
    found = server.request("/v1/chat/completions", body, HEADERS)
    assert found.status == 200
    assert found.headers["content-type"].startswith("text/event-stream")
    chunks = read_events(found.text)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] in ("length", "stop")
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] <= 8
    assert "num_ctx" in found.headers["x-draftwood-warning"]


def test_open_webui_asks_for_titles(server: Running) -> None:
    """Requests for titles, tags and follow-up questions do not stream. Through a pipeline, ``user`` is an object."""
    user = {"name": "a", "id": "1", "email": "a@example.org", "role": "user"}
    body = {"model": NAME, "messages": user_message("Title?"), "stream": False, "max_tokens": 4, "user": user}
    found = server.request("/v1/chat/completions", body, HEADERS)
    assert isinstance(found.body["choices"][0]["message"]["content"], str)
    assert found.body["usage"]["total_tokens"] > 0


def test_open_webui_shows_errors(server: Running) -> None:
    body = {"model": NAME, "messages": user_message("a"), "stream": True, "temperature": -1}
    found = server.request("/v1/chat/completions", body, HEADERS)
    assert found.status == 400
    assert "temperature" in found.error["message"]


class Tree(BaseModel):
    """A tree."""

    model_config = ConfigDict(extra="forbid")  # a random model would go on with further fields
    kind: Literal["oak", "ash"]
    evergreen: bool


@pytest.fixture
def chat_model(server: Running) -> Any:
    package = pytest.importorskip("langchain_openai")
    return package.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key=KEY, model=NAME, temperature=0, max_completion_tokens=256, max_retries=0
    )


def test_langchain_invokes_and_streams(server: Running, chat_model: Any) -> None:
    expected = server.chat(HEADERS, temperature=0, max_tokens=256, messages=user_message("hello")).body
    answer = chat_model.invoke("hello")
    assert answer.content == expected["choices"][0]["message"]["content"]
    assert answer.usage_metadata["output_tokens"] == expected["usage"]["completion_tokens"]
    parts = list(chat_model.stream("hello"))
    assert "".join(part.content for part in parts) == answer.content
    assert len(chat_model.batch(["a", "b", "c"])) == 3


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_objects(chat_model: Any, method: str) -> None:
    pytest.importorskip("llguidance")
    found = chat_model.with_structured_output(Tree, method=method).invoke("Describe a tree.")
    assert isinstance(found, Tree)


def test_langchain_calls_tools(chat_model: Any) -> None:
    pytest.importorskip("llguidance")
    bound = chat_model.bind_tools([Tree], tool_choice="any", strict=True, parallel_tool_calls=False)
    (call,) = bound.invoke("Describe a tree.").tool_calls
    assert Tree(**call["args"]) is not None
    messages = pytest.importorskip("langchain_core.messages")
    first = messages.HumanMessage("Describe a tree.")
    history = [first, messages.AIMessage("", tool_calls=[call]), messages.ToolMessage("noted", tool_call_id=call["id"])]
    assert isinstance(chat_model.invoke(history).content, str)
