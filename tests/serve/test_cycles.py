"""Cycles in a stream: off by default, and true to the tree, the output and the target."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from draftwood import SamplingParams
from tests.conftest import logits_after
from tests.tools.serve import Running, serving, user_message

MESSAGES = user_message("the cat sat on the mat, the cat sat")
TOKENS = 24


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(drafter="goose") as running:
        yield running


def read_chunks(server: Running, **fields: Any) -> list[Any]:
    sent = {"messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0, "stream": True, **fields}
    events = server.chat(**sent).text.split("\n\n")[:-2]
    return [json.loads(event.removeprefix("data: ")) for event in events]


def read_cycles(server: Running, **fields: Any) -> list[Any]:
    chunks = read_chunks(server, stream_options={"include_cycles": True}, **fields)
    return [chunk["draftwood"]["cycle"] for chunk in chunks if "draftwood" in chunk]


def test_streams_have_no_cycles_by_default(server: Running) -> None:
    assert not any("draftwood" in chunk for chunk in read_chunks(server))
    assert (
        server.chat(max_tokens=4, stream_options={"include_cycles": True}).status == 200
    )  # without a stream: no effect
    assert server.chat(stream=True, stream_options={"include_cycles": 1}).error["param"] == "include_cycles"


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 3}, {"drafter": "plain"}])
def test_cycles_add_up_to_the_answer(server: Running, fields: dict[str, Any]) -> None:
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in read_chunks(server, **fields))
    cycles = read_cycles(server, **fields)
    assert "".join(token["text"] for cycle in cycles for token in cycle["tokens"]) == text
    assert [cycle["number"] for cycle in cycles] == list(range(1, len(cycles) + 1))
    last = None
    for cycle in cycles:
        nodes, tokens = cycle["nodes"], cycle["tokens"]
        assert last is None or nodes[0]["token"] == last
        last = tokens[-1]["token"]
        assert (nodes[0]["parent"], nodes[0]["source"]) == (-1, "root")
        assert all(0 <= node["parent"] < index for index, node in enumerate(nodes) if index)
        path = [token["node"] for token in tokens if token["node"] is not None]
        assert [index for index, node in enumerate(nodes) if index and node["accepted"]] == path
        for token in tokens:
            if token["node"] is None:
                assert token["source"] == "target"
            else:
                node = nodes[token["node"]]
                assert (node["token"], node["source"], node["target"]) == tuple(
                    token[name] for name in ("token", "source", "target")
                )
        assert cycle["seconds"]["total"] > 0
        assert all(seconds >= 0 for seconds in cycle["seconds"].values())


def test_probabilities_are_those_of_the_target(server: Running) -> None:
    codec, target = server.llm.tokenizer, server.llm.engine.target
    tokens = codec.apply_chat(MESSAGES)
    cycles = read_cycles(server)
    assert any(len(cycle["nodes"]) > 2 for cycle in cycles)
    for cycle in cycles[:6]:
        nodes = cycle["nodes"]
        paths = [tokens]
        for node in nodes[1:]:
            path = paths[node["parent"]]
            paths.append([*path, node["token"]])
            with server.llm.engine.at_rest():
                expected = float(logits_after(target, path)[-1].softmax(-1)[node["token"]])
            assert node["target"] == pytest.approx(expected, abs=2e-4)
        tokens = [*tokens, *(token["token"] for token in cycle["tokens"])]


def test_samples_have_cycles_of_their_own(server: Running) -> None:
    chunks = read_chunks(server, n=2, seed=1, temperature=1, stream_options={"include_cycles": True})
    numbers: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        if "draftwood" in chunk:
            numbers[chunk["choices"][0]["index"]].append(chunk["draftwood"]["cycle"]["number"])
    assert all(each == list(range(1, len(each) + 1)) and each for each in numbers.values())


def test_the_budget_of_a_request(server: Running) -> None:
    whole, small = read_cycles(server), read_cycles(server, budget=3)
    assert max(len(cycle["nodes"]) for cycle in whole) > 3
    assert max(len(cycle["nodes"]) for cycle in small) == 3
    assert read_chunks(server, budget=3)[-1]["choices"][0]["finish_reason"] == "length"
    for wrong in (0, 13, "8", True, 1.5):
        assert server.chat(budget=wrong).error["param"] == "budget"


def test_events_have_no_details_by_default(server: Running) -> None:
    events = list(server.llm.stream_chat(MESSAGES, SamplingParams(max_tokens=TOKENS)))
    assert all(event.detail is None for event in events)
