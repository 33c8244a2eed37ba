"""Parsing of requests, and the errors for invalid ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.serve.conversations import parse_anthropic, parse_input, parse_messages
from draftwood.serve.errors import ApiError
from draftwood.serve.fields import CHAT, COMPLETIONS, MESSAGES, RESPONSES, check_fields
from draftwood.serve.requests import (
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    RequestLimits,
    check_model,
    parse_options,
    parse_prompts,
)
from tests.tools.serve import NAME, Running, serving, user_message

LIMITS = RequestLimits(context_length=64, drafters=["plain", "goose"])
HELLO = {"model": NAME, "messages": user_message("hello")}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = """
model messages prompt temperature top_p n stop seed stream stream_options max_tokens max_completion_tokens logprobs
top_logprobs prediction drafter tools tool_choice parallel_tool_calls logit_bias response_format regex grammar
stop_token_ids user unknown_field input instructions system text budget echo
"""
FIELDS = st.sampled_from(NAMES.split())


def find_error(parse: Callable[[], object]) -> ApiError | None:
    try:
        parse()
    except ApiError as error:
        return error
    return None


@given(st.dictionaries(FIELDS, JSON, max_size=4), st.booleans())
def test_any_fields_are_parsed_or_rejected(fields: dict[str, Any], chat: bool) -> None:
    for parse in (
        lambda: check_model(fields.get("model"), [NAME]),
        lambda: parse_options(fields, LIMITS, is_chat=chat),
        lambda: parse_messages(fields, LIMITS) if chat else parse_prompts(fields, LIMITS),
        lambda: parse_input(fields, LIMITS) if chat else parse_anthropic(fields, LIMITS),
        lambda: check_fields(fields, CHAT if chat else COMPLETIONS, strict=True),
        lambda: check_fields(fields, MESSAGES if chat else RESPONSES, strict=False),
    ):
        error = find_error(parse)
        assert error is None or (400 <= error.status < 500 and str(error))


def test_defaults_are_openais() -> None:
    options = parse_options(HELLO, LIMITS, is_chat=True)
    assert (options.params.temperature, options.params.max_tokens, options.stream) == (1.0, 64, False)
    assert parse_options({}, LIMITS, is_chat=False).params.max_tokens == 16


def test_null_is_the_same_as_a_missing_field() -> None:
    names = ("temperature", "top_p", "n", "stop", "seed", "max_tokens", "tools", "logit_bias", "prediction", "drafter")
    nulls = dict.fromkeys(names)
    assert parse_options({**HELLO, **nulls}, LIMITS, is_chat=True) == parse_options(HELLO, LIMITS, is_chat=True)


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "short"}, {"role": "user", "content": parts}]
    assert parse_messages({"messages": messages}, LIMITS) == [
        {"role": "system", "content": "short"},
        {"role": "user", "content": "ab"},
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 3}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "who?"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "messages[0]"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 3}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"drafter": "nobody"}, "drafter"),
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {"type": "content", "content": "a" * 100_000}}, "prediction"),
        ({"temperature": 10**400}, "temperature"),
        ({"tools": [{}]}, "tools[0]"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"\u00b2": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 0)}, "logit_bias"),
        ({"echo": True}, "echo"),
        ({"temperature": 2**64}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"repetition_penalty": 1e308}, "repetition_penalty"),
        ({"repetition_penalty": 1e-308}, "repetition_penalty"),
        ({"presence_penalty": -1e308}, "presence_penalty"),
        ({"frequency_penalty": 2**70}, "frequency_penalty"),
        ({"stop": ["a"] * (MAX_STOPS + 1)}, "stop"),
        ({"stop": "a" * (MAX_STOP_CHARACTERS + 1)}, "stop"),
        ({"stop_token_ids": [1] * 10_000}, "stop_token_ids"),
        ({"n": 10**9}, "n"),
        ({"n": 200, "max_tokens": 10**9, "logprobs": True, "top_logprobs": 20}, "logprobs"),
        ({"prediction": {"type": "content", "content": "ab" * 3000}}, "prediction"),
        ({"messages": user_message("") * 5000}, "messages"),
        ({"messages": user_message("some words " * 1000) * 12}, "messages"),
    ],
    ids=str,
)
def test_invalid_fields_are_rejected(server: Running, fields: dict[str, Any], param: str) -> None:
    found = server.chat(**fields)
    assert found.status == 400
    assert found.error["param"] == param
    assert found.error["type"] == "invalid_request_error"
    assert "Traceback" not in found.error["message"]


def test_unsupported_fields_without_effect_are_accepted(server: Running) -> None:
    fields = {"tools": [], "response_format": {"type": "text"}, "user": "me", "store": True, "logit_bias": {}}
    assert server.chat(max_tokens=2, **fields).status == 200


@pytest.mark.parametrize("prompt", ["", [], [[]], [1, "a"], [1.5], [True], {"a": 1}, None, ["a", ""]], ids=str)
def test_invalid_prompts_are_rejected(server: Running, prompt: object) -> None:
    found = server.request("/v1/completions", {"model": NAME, "prompt": prompt})
    assert (found.status, found.error["param"]) == (400, "prompt")


def test_prompts_beyond_the_context_are_rejected(server: Running) -> None:
    found = server.chat(messages=user_message("long " * 2000))
    assert found.status == 400
    assert found.error["code"] == "context_length_exceeded"
    unknown = server.request("/v1/completions", {"model": NAME, "prompt": [1, 99999]})
    assert (unknown.status, unknown.error["param"]) == (400, "prompt")


def test_unknown_models_are_not_found(server: Running) -> None:
    found = server.chat(model="gpt-4")
    assert (found.status, found.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"\xff\xfe", b"3", b"[" * 5000, b'{"n": ' + b"1" * 5000 + b"}"],
    ids=lambda body: repr(body[:8]),
)
def test_bodies_must_be_json_objects(server: Running, body: bytes) -> None:
    assert server.request("/v1/chat/completions", body, method="POST").status == 400


def test_top_logprobs_are_limited(server: Running) -> None:
    found = server.request("/v1/completions", {"model": NAME, "prompt": "a", "logprobs": 21})
    assert (found.status, found.error["param"]) == (400, "logprobs")


def test_negative_seeds(server: Running) -> None:
    found = [server.chat(seed=seed, max_tokens=8).body["choices"][0]["message"]["content"] for seed in (-1, -1, 2)]
    assert found[0] == found[1] != found[2]


def test_lone_surrogates(server: Running) -> None:
    assert server.chat(messages=user_message("a\ud83d"), max_tokens=2).status in (200, 400)
    assert server.chat(prediction={"type": "content", "content": "a\ud83d"}, max_tokens=2).status in (200, 400)


@pytest.mark.parametrize("stream", [False, True])
def test_the_extremes_of_all_numbers_are_served(server: Running, stream: bool) -> None:
    for sign in (1, -1):
        fields = {"presence_penalty": sign * 1000, "frequency_penalty": sign * 1000.0, "repetition_penalty": 1000**sign}
        for temperature in (0, 5e-324, 1e-25, 1000):
            for top_k, more in ((2**80, fields), (10**400, {})):
                found = server.chat(
                    temperature=temperature, top_k=top_k, min_p=1, seed=-(2**70), max_tokens=9, stream=stream, **more
                )
                assert found.status == 200
                assert "error" not in found.text


def test_unknown_fields_are_ignored_with_a_warning(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    fields: dict[str, Any] = {"temprature": 0.5, "prompt": "of another endpoint", "max_tokens": 2}
    for stream in (False, True):
        found = server.chat(**fields, stream=stream)
        assert found.status == 200
        assert found.headers["x-draftwood-warning"] == "Ignored unknown fields: 'temprature', 'prompt'"
    assert "temprature" in caplog.text
    odd = server.chat(**{"\r\nset-cookie: a=b\ud83d\u00fc": 1, "max_tokens": 1})
    assert (odd.status, odd.headers["set-cookie"]) == (200, None)
    assert "x-draftwood-warning" not in server.chat(max_tokens=1).headers


def test_unknown_fields_are_an_error_for_a_strict_server() -> None:
    with serving({"strict": True}) as server:
        found = server.chat(temprature=0.5)
        assert (found.status, found.error["param"]) == (400, "temprature")
        assert "Did you mean 'temperature'?" in found.error["message"]
        assert server.chat(user="me", max_tokens=1).status == 200


def test_the_model_may_be_missing(server: Running) -> None:
    assert server.chat(model=None, max_tokens=1).body["model"] == NAME
    with serving({"names": ("first", "second")}) as two:
        assert two.chat(model=None, max_tokens=1).body["model"] == "first"
        assert two.chat(model="second", max_tokens=1).body["model"] == "second"
        assert two.chat(model=NAME).status == 404


def test_errors_quote_little(server: Running) -> None:
    long = "x" * 200_000
    requests: list[dict[str, Any]] = [
        {"model": long}, {"drafter": long}, {"stream": long}, {"temperature": long}, {"stop": [3, long]},
        {"messages": [{"role": long, "content": 3}]}, {"seed": [long]}, {long: 1, "n": 0},
    ]  # fmt: skip
    for fields in requests:
        found = server.chat(**fields)
        assert 400 <= found.status < 500
        assert len(found.text) < 3000
    assert len(server.request(f"/{long[:30_000]}").text) < 3000


def test_unknown_paths_and_methods(server: Running) -> None:
    assert server.request("/v1/chat").status == 404
    wrong = server.request("/v1/chat/completions")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert server.request("/v1/models", {}).status == 405
    assert server.request("/v1/models/").status == 200
    assert server.request("/v1/completions/", {"model": NAME, "prompt": "a", "max_tokens": 1}).status == 200
    assert (server.request("/health", method="HEAD").status, server.request("/health", method="HEAD").text) == (200, "")
