"""The rest of the API: token endpoints, biases, echo, usage of predictions, timings, keys of other clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from draftwood import SamplingParams
from draftwood.serve.formats.usage import count_used
from tests.tools.serve import NAME, Running, serving, user_message

TIMINGS = {
    "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n", "predicted_ms",
    "predicted_per_token_ms", "predicted_per_second", "draft_n", "draft_n_accepted",
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(drafter="goose") as running:
        yield running


def complete(server: Running, prompt: Any, **fields: Any) -> Any:
    sent = {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 12, **fields}
    return server.request("/v1/completions", sent)


def test_tokens_of_texts_and_chats(server: Running) -> None:
    codec = server.llm.tokenizer
    for fields in (
        {"prompt": "a tree"},
        {"content": "a tree", "add_special": True},
        {"model": NAME, "prompt": "a tree"},
    ):
        found = server.request("/tokenize", fields).body
        assert found == {"tokens": codec.encode("a tree"), "count": 7, "max_model_len": server.llm.info.context_length}
    named = server.request("/tokenize", {"prompt": "ab", "return_token_strs": True}).body
    assert named["token_strs"] == ["<bos>", "a", "b"]
    chat = server.request("/tokenize", {"messages": user_message("hi")}).body["tokens"]
    assert chat == codec.apply_chat(user_message("hi"))
    assert server.request("/tokenize", {"prompt": "", "add_special_tokens": False}).body["tokens"] == []
    back = server.request("/detokenize", {"tokens": codec.encode("a tree", add_special=False)}).body
    assert back == {"prompt": "a tree", "content": "a tree"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a" * 200_000}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
def test_wrong_fields_of_token_endpoints(server: Running, path: str, fields: Any, param: str) -> None:
    found = server.request(path, fields)
    assert (found.status, found.error["param"]) == (400, param)


def test_biases_change_the_output_as_in_the_library(server: Running) -> None:
    plain = complete(server, "hello").body["choices"][0]["text"]
    token = server.llm.tokenizer.encode("~", add_special=False)[0]
    forced = complete(server, "hello", logit_bias={str(token): 100}).body["choices"][0]["text"]
    assert forced == "~" * 12 != plain
    first = server.llm.generate("hello", SamplingParams(max_tokens=1))[0].token_ids[0]
    params = SamplingParams(max_tokens=12, logit_bias={first: -100})
    for drafter in ("plain", "goose", "stand"):
        expected = server.llm.generate("hello", params, drafter="plain")[0]
        assert first not in expected.token_ids
        found = complete(server, "hello", logit_bias={str(first): -100}, drafter=drafter).body["choices"][0]["text"]
        assert found == expected.text
    sampled = {"temperature": 1.0, "seed": 2, "logit_bias": {str(first): -100}}
    texts = {
        complete(server, "hello", drafter=name, **sampled).body["choices"][0]["text"] for name in ("plain", "goose")
    }
    assert len(texts) == 1


def test_echo_repeats_the_prompt(server: Running) -> None:
    text = complete(server, "hello ").body["choices"][0]["text"]
    assert complete(server, "hello ", echo=True).body["choices"][0]["text"] == "hello " + text
    ids = server.llm.tokenizer.encode("hello ")
    both = complete(server, [ids, server.llm.tokenizer.encode("x")], echo=True, n=2, seed=1).body["choices"]
    assert [choice["text"][0] for choice in both] == ["h", "h", "x", "x"]
    events = complete(server, "hello ", echo=True, stream=True).text.split("\n\n")[:-2]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello " + text
    refused = complete(server, "hello ", echo=True, logprobs=1)
    assert (refused.status, refused.error["param"]) == (400, "echo")


def test_used_tokens_of_a_prediction_are_counted(server: Running) -> None:
    only_ascii = {str(token): -100 for token in range(256) if not 32 <= token < 127}
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "logit_bias": only_ascii}
    text = server.chat(**fields).body["choices"][0]["message"]["content"]

    def details(content: str) -> tuple[int, int]:
        found = server.chat(**fields, prediction={"type": "content", "content": content}).body["usage"]
        known = found["completion_tokens_details"]
        return known["accepted_prediction_tokens"], known["rejected_prediction_tokens"]

    size = len(server.llm.tokenizer.encode(text, add_special=False))
    assert details(text) == (size, 0)
    used, unused = details(text + "and more")
    assert (used, unused) == (size, 8)
    none = server.chat(**fields).body["usage"]["completion_tokens_details"]
    assert set(none.values()) == {0}


@pytest.mark.parametrize(
    ("prediction", "output", "used"),
    [
        ([], [1, 2], 0),
        ([1, 2, 3], [], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 5, 6], 5),  # one replaced
        ([1, 2, 3, 4, 5, 6], [1, 2, 4, 5, 6], 5),  # one dropped
        ([1, 2, 3, 4], [1, 2, 9, 9, 3, 4], 4),  # some added
        ([1, 2, 3, 4], [8, 9], 0),
        ([1, 1, 1, 1], [1, 1], 2),
        ([3, 4], [1, 2, 3, 4, 3, 4], 2),
    ],
)
def test_tokens_of_the_prediction_in_the_output(prediction: list[int], output: list[int], used: int) -> None:
    assert count_used(prediction, output) == used


def test_timings_of_llama_cpp(server: Running) -> None:
    messages = user_message("the cat sat on the mat, the cat sat on the")
    fields: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 24}
    found = server.chat(**fields).body
    times, usage = found["timings"], found["usage"]
    assert set(times) == TIMINGS
    assert times["predicted_n"] == usage["completion_tokens"] == 24
    assert times["prompt_n"] + times["cache_n"] == usage["prompt_tokens"]
    assert times["draft_n"] >= times["draft_n_accepted"] == 24 - found["draftwood"]["passes"]
    assert times["predicted_ms"] > 0
    assert times["predicted_per_second"] == pytest.approx(24_000 / times["predicted_ms"], rel=1e-3)
    for options, last in (({}, -1), ({"stream_options": {"include_usage": True}}, -1)):
        events = server.chat(**fields, stream=True, **options).text.split("\n\n")[:-2]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[last]["timings"]["predicted_n"] == 24


def test_other_clients_send_their_key_elsewhere() -> None:
    with serving({"api_keys": ("right",)}) as server:
        assert server.request("/v1/models", headers={"x-api-key": "right"}).status == 200
        assert server.request("/v1/models", headers={"x-api-key": "wrong"}).status == 401
        for path in ("/tokenize", "/detokenize", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"):
            assert server.request(path, {}).status == 401
        assert server.request("/v1/messages", {}).body["error"]["type"] == "authentication_error"


def read_metrics(server: Running) -> dict[str, float]:
    lines = [line for line in server.request("/metrics").text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_histograms() -> None:
    with serving(drafter="goose") as server:
        for _ in range(3):
            server.chat(messages=user_message("the cat sat on the cat sat on"), max_tokens=16, n=2, ignore_eos=True)
        server.chat(max_tokens=1)
        found = read_metrics(server)
        for name in ("queue_seconds", "time_to_first_token_seconds", "tokens_per_pass"):
            assert found[f"draftwood_{name}_count"] == found["draftwood_samples_total"] == 7
            assert found[f'draftwood_{name}_bucket{{le="+Inf"}}'] == 7
        assert found["draftwood_time_per_token_seconds_count"] == 6  # a single token has no second one
        assert found["draftwood_time_to_first_token_seconds_sum"] >= found["draftwood_first_token_seconds_total"]
        assert 7 <= found["draftwood_tokens_per_pass_sum"] <= 7 * 12
        assert found["draftwood_cache_tokens"] == 4096
        assert found["draftwood_reserved_cache_tokens"] == 0
