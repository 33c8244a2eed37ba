"""Streams cost little: one wake-up for a cycle, one write for what comes together, and frames of parts as h11's."""

from __future__ import annotations

import json
import threading
from typing import Any

import h11
import pytest

from draftwood import SamplingParams
from draftwood.engine import step
from draftwood.serve.connections import ResponseParts
from draftwood.serve.runner import GenerationJob, Runner, deliver_all
from tests.tools.engine import make_llm
from tests.tools.serve import Running, serving

REQUEST = b"GET / HTTP/1.%d\r\nhost: x\r\n\r\n"


def test_results_of_a_cycle_are_handed_over_together() -> None:
    calls: list[int] = []
    ended = threading.Event()
    finished: list[str] = []

    def call_there(function: Any, results: Any) -> None:
        assert function is deliver_all
        calls.append(len(results))
        function(results)

    def deliver(_: int, result: Any) -> None:
        if result.finish_reason is not None:
            finished.append(result.finish_reason)
            if len(finished) == 4:
                ended.set()

    with make_llm() as llm:
        runner = Runner(llm, max_samples=8)
        job = GenerationJob([3, 4, 5], SamplingParams(max_tokens=6, n=4, ignore_eos=True))
        runner.submit([job], deliver)
        runner.start(call_there)
        assert ended.wait(30.0)
        runner.close()
    assert finished == ["length"] * 4
    assert max(calls) > 1
    assert runner.num_open == 0


def test_results_are_handed_over_when_the_next_pass_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before it: the thread that takes them would hold the interpreter lock while the engine prepares the pass."""
    seen: list[str] = []
    ended = threading.Event()

    def deliver(_: int, result: Any) -> None:
        seen.append("event")
        if result.finish_reason is not None:
            ended.set()

    with make_llm() as llm:
        draft, launch = step.draft, llm.engine.target.launch
        monkeypatch.setattr(step, "draft", lambda *args, **options: (seen.append("draft"), draft(*args, **options))[1])
        monkeypatch.setattr(llm.engine.target, "launch", lambda *args: (seen.append("pass"), launch(*args))[1])
        runner = Runner(llm, max_samples=8)
        runner.submit([GenerationJob([3], SamplingParams(max_tokens=3, ignore_eos=True), "plain")], deliver)
        runner.start(lambda function, results: function(results))
        assert ended.wait(30.0)
        runner.close()
    # The last one does not wait for a pass that never comes.
    assert seen == ["draft", "pass", "draft", "event", "pass", "draft", "event", "pass", "event"]


@pytest.mark.parametrize("minor", [0, 1])
def test_parts_are_framed_as_h11_frames_them(minor: int) -> None:
    """HTTP/1.0 has no chunked encoding. The second response of a connection does not depend on the first."""
    sides = [h11.Connection(h11.SERVER), ResponseParts(h11.SERVER)]
    for headers in ([], [("content-length", "5")]):
        outputs = []
        for side in sides:
            side.receive_data(REQUEST % minor)
            assert isinstance(side.next_event(), h11.Request)
            assert isinstance(side.next_event(), h11.EndOfMessage)
            events = [h11.Response(status_code=200, headers=headers), h11.Data(b"ab"), h11.Data(b""), h11.Data(b"cde")]
            outputs.append([side.send(event) for event in [*events, h11.EndOfMessage()]])
            if minor:
                side.start_next_cycle()
        assert outputs[0] == outputs[1]
        if not minor:
            return


@pytest.fixture(scope="module")
def server() -> Any:
    with serving() as running:
        yield running


def read_chunks(server: Running, path: str, body: dict[str, Any]) -> list[bytes]:
    """The parts of a response as the server wrote them."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with server.connect(
        f"{head}content-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data
    ) as connection:
        found = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    rest, chunks = found.partition(b"\r\n\r\n")[2], list[bytes]()
    while rest and rest != b"0\r\n\r\n":
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return chunks


def test_what_comes_together_is_written_together(server: Running) -> None:
    messages = [{"role": "user", "content": "hello"}]
    fields = {"messages": messages, "stream": True, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "n": 2}
    chunks = read_chunks(server, "/v1/chat/completions", fields)
    assert chunks[-1].endswith(b"data: [DONE]\n\n")
    assert chunks[-1].count(b"data: ") > 1  # the last tokens are in it too
    events = [json.loads(line[6:]) for line in b"".join(chunks).split(b"\n\n") if line.startswith(b"data: {")]
    assert len(chunks) < len(events)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_chunks_of_text_are_as_others(server: Running, path: str) -> None:
    """Most chunks are made from a frame; with log-probabilities they are not."""
    asked = {"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {"prompt": "hello"}
    plain = {**asked, "stream": True, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    logprobs = {"logprobs": True} if "chat" in path else {"logprobs": 0}
    sides = []
    for fields in (plain, {**plain, **logprobs}):
        whole = b"".join(read_chunks(server, path, fields))
        events = [json.loads(line[6:]) for line in whole.split(b"\n\n") if line.startswith(b"data: {")]
        for event in events:
            for name in ("id", "created", "timings"):
                event.pop(name, None)
            for choice in event["choices"]:
                choice["logprobs"] = None
        sides.append([json.dumps(event) for event in events])
    assert sides[0] == sides[1]
    assert len(sides[0]) > 2
