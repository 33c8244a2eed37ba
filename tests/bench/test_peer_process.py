"""The process of a peer: workers that respond, fail, hang or send invalid messages, and the requests they get."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftwood.bench.peers import Peer, PeerModel, PeerResult, PeerSpec, process
from draftwood.bench.peers.messages import decode_result, encode_request
from draftwood.bench.peers.specs import WORKERS
from draftwood.config import SamplingParams
from draftwood.errors import CapabilityError, DraftwoodError

# Implements the protocol without an engine; the model folder selects the behaviour.
FAKE = """
import json, os, sys, time
mode = ""
for line in sys.stdin:
    message = json.loads(line)
    answer = {"id": message["id"]}
    if message["op"] == "load":
        mode = message["folder"]
        answer["told"] = message
        names = ("PYTHONPATH", "PYTHONSAFEPATH", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS")
        answer["variables"] = {name: os.environ.get(name) for name in names}
        if mode == "slow to load":
            time.sleep(600)
        if mode == "cannot load":
            answer["error"] = "OSError: no such model"
    else:
        if mode == "dies":
            sys.exit("the last words\\nof the worker")
        if mode == "is killed":
            os.kill(os.getpid(), 9)
        if mode == "hangs":
            time.sleep(600)
        if mode == "garbage":
            print("this is no JSON", flush=True)
        if mode == "another answer":
            answer["id"] = 77
        if mode == "refuses" and message["max_tokens"] == 3:
            answer["error"] = "ValueError: three is too much"
        answer.update(token_ids=message["prompt_ids"][::-1], total_seconds=2.0, first_token_seconds=0.5)
        answer.update(finish_reason="length", peak_bytes=1000, counts={"cycles": 2, "drafted": 4, "accepted": 1})
        if mode == "half an answer":
            del answer["token_ids"]
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeerSpec:
    return fake_spec(tmp_path, monkeypatch, FAKE)


def fake_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> PeerSpec:
    monkeypatch.setenv("DRAFTWOOD_PEER_FAKE", sys.executable)
    worker = tmp_path / "fake_worker.py"
    worker.write_text(script)
    return PeerSpec(name="fake:kind", engine="fake", title="a fake", packages=("json",), worker=worker)


def model(mode: str = "good", **more: Any) -> PeerModel:
    return PeerModel(folder=Path(mode), **more)


def test_worker_gets_request_and_returns_result(
    fake: PeerSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # it would shadow the files next to a worker
    shown: list[tuple[str, int, int]] = []
    request = model(dtype="bfloat16", threads=3, max_context=77, assistant=tmp_path, gguf=tmp_path / "x.gguf")
    with Peer(fake, request, lambda *step: shown.append(step)) as peer:
        told = peer.facts["told"]
        answer = peer.generate([5, 6, 7], SamplingParams(max_tokens=9))
    assert shown == [("starting fake:kind", 0, 1), ("starting fake:kind", 1, 1)]
    assert (told["variant"], told["dtype"], told["dtype_is_free"], told["max_context"]) == (
        "kind",
        "bfloat16",
        True,
        77,
    )
    assert (told["assistant"], told["gguf"]) == (str(tmp_path), str(tmp_path / "x.gguf"))
    threads = {"OMP_NUM_THREADS": "3", "NUMBA_NUM_THREADS": "3"}
    assert peer.facts["variables"] == {"PYTHONPATH": None, "PYTHONSAFEPATH": None, **threads}
    assert answer.token_ids == [7, 6, 5]
    assert (answer.decode_tokens, answer.decode_seconds) == (2, 1.5)
    assert answer.peak_bytes == 1000
    assert answer.stats == {
        "prompt_tokens": 3,
        "output_tokens": 3,
        "cycles": 2,
        "acceptance_length": 1.5,
        "drafted_nodes": 4,
        "mean_tree_size": 3.0,
        "accepted_nodes": 1,
    }


def test_dtype_option_overrides_dtype_of_model(fake: PeerSpec) -> None:
    with Peer(replace(fake, options={"dtype": "float16"}), model(dtype="bfloat16")) as peer:
        told = peer.facts["told"]
    assert (told["dtype"], told["dtype_is_free"]) == ("float16", False)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("dies", "exited without a reply\n  got: exit code 1\nthe last words\nof the worker"),
        ("is killed", "exited without a reply\n  got: Killed"),
        ("garbage", "sent an invalid reply\n  got: 'this is no JSON"),
        ("another answer", "sent an invalid reply"),
        ("half an answer", "sent an invalid reply\n  got: KeyError: 'token_ids'"),
    ],
)
def test_failed_worker_raises_and_is_stopped(fake: PeerSpec, mode: str, said: str) -> None:
    peer = Peer(fake, model(mode))
    with pytest.raises(DraftwoodError) as error:
        peer.generate([1], SamplingParams())
    assert f"The peer fake:kind {said}" in str(error.value)
    with pytest.raises(DraftwoodError, match="is closed"):
        peer.generate([1], SamplingParams())
    peer.close()


def test_a_refused_request_leaves_the_worker_running(fake: PeerSpec) -> None:
    with Peer(fake, model("refuses")) as peer:
        with pytest.raises(DraftwoodError, match="failed\n  got: ValueError: three is too much"):
            peer.generate([1], SamplingParams(max_tokens=3))
        assert peer.generate([1], SamplingParams(max_tokens=4)).token_ids == [1]


def test_hanging_worker_times_out_and_is_stopped(fake: PeerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DraftwoodError, match="did not reply within 0 seconds"):
        Peer(fake, model("slow to load"), load_seconds=0.3)
    peer = Peer(fake, model("hangs"))
    running = peer._process
    assert running is not None
    monkeypatch.setattr(process, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(process, "TOKEN_SECONDS", 0.0)
    with pytest.raises(DraftwoodError, match="did not reply"):
        peer.generate([1], SamplingParams())
    assert running.returncode is not None


def test_a_model_that_cannot_be_loaded_leaves_no_worker(fake: PeerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = Peer._start

    def noted(self: Peer, *given: Any) -> None:
        start(self, *given)
        assert self._process is not None
        started.append(self._process)

    monkeypatch.setattr(Peer, "_start", noted)
    with pytest.raises(DraftwoodError, match="OSError: no such model"):
        Peer(fake, model("cannot load"))
    assert started[0].returncode is not None


def test_an_interrupt_ends_the_worker(fake: PeerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(fake, model("hangs"))
    running = peer._process
    assert running is not None

    def interrupted(timeout: float) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(peer._lines, "get", interrupted)
    with pytest.raises(KeyboardInterrupt):
        peer.generate([1], SamplingParams())
    assert running.returncode is not None


def test_close_stops_the_worker_and_is_idempotent(fake: PeerSpec) -> None:
    peer = Peer(fake, model())
    running = peer._process
    assert running is not None
    peer.close()
    assert running.returncode == 0  # it exited at the end of its input
    peer.close()


def test_prints_of_libraries_do_not_disturb_the_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {str(WORKERS)!r})
from protocol import serve

def load(model):
    print("a library says hello")
    os.write(1, b"and one that is written in C\\n")
    return generate, {{"version": "1"}}

def generate(request):
    os.system("echo so does a child")
    if request["max_tokens"] == 1:
        raise RuntimeError("not one")
    return {{"token_ids": [1], "total_seconds": 1, "finish_reason": "stop"}}

serve(load)
"""
    with Peer(fake_spec(tmp_path, monkeypatch, script), model()) as peer:
        assert peer.facts["version"] == "1"
        assert peer.generate([1], SamplingParams()).finish_reason == "stop"
        assert sorted(peer._read_log().splitlines()) == [
            "a library says hello",
            "and one that is written in C",
            "so does a child",
        ]
        with pytest.raises(DraftwoodError, match="RuntimeError: not one"):
            peer.generate([1], SamplingParams(max_tokens=1))
        assert "Traceback" in peer._read_log()
        assert peer.generate([1], SamplingParams()).finish_reason == "stop"


def test_library_that_reads_stdin_does_not_consume_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {str(WORKERS)!r})
from protocol import serve

def load(model):
    return generate, {{}}

def generate(request):
    return {{"token_ids": list(os.read(0, 99)), "total_seconds": 1, "finish_reason": "stop"}}

serve(load)
"""
    monkeypatch.setattr(process, "ANSWER_SECONDS", 5.0)
    monkeypatch.setattr(process, "TOKEN_SECONDS", 0.0)
    with Peer(fake_spec(tmp_path, monkeypatch, script), model()) as peer:
        assert peer.generate([1], SamplingParams()).token_ids == []


# Messages


def test_request_has_own_seed_or_seed_of_engine() -> None:
    asked = encode_request([1, 2], SamplingParams(temperature=0.5, top_k=3, seed=9), seed=4)
    assert (asked["prompt_ids"], asked["temperature"], asked["top_k"], asked["seed"]) == ([1, 2], 0.5, 3, 9)
    assert encode_request([1], SamplingParams(), seed=4)["seed"] == 4


@pytest.mark.parametrize(
    "more", [{"stop": "x"}, {"presence_penalty": 1.0}, {"n": 2}, {"logprobs": 1}, {"stop_token_ids": (2,)}]
)
def test_parameters_with_engine_specific_meaning_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(CapabilityError):
        encode_request([1], SamplingParams(**more), seed=0)


@pytest.mark.parametrize(
    "content",
    [
        {"token_ids": "text", "total_seconds": 1, "finish_reason": "stop"},
        {"token_ids": [1.5], "total_seconds": 1, "finish_reason": "stop"},
        {"token_ids": [1], "total_seconds": None, "finish_reason": "stop"},
        {"token_ids": [1], "total_seconds": 1, "first_token_seconds": 2, "finish_reason": "stop"},
    ],
)
def test_invalid_result_is_rejected(content: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode_result(content, 1)


def test_tokens_emitted_with_the_first_do_not_count_as_decoding() -> None:
    answer = PeerResult(
        token_ids=[1, 2, 3, 4, 5], first_token_seconds=1.0, total_seconds=3.0, finish_reason="stop", first_tokens=3
    )
    assert (answer.decode_tokens, answer.decode_seconds) == (2, 2.0)
    untold = replace(answer, first_token_seconds=None)
    assert (untold.decode_tokens, untold.decode_seconds) == (5, 3.0)
