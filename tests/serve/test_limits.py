"""Slow, idle and half-sent connections: what clients may hold, and for how long."""

from __future__ import annotations

import json
import logging
import resource
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from h11._connection import DEFAULT_MAX_INCOMPLETE_EVENT_SIZE

from draftwood.config import MAX_PENALTY, MAX_TEMPERATURE
from draftwood.engine.scheduler import MAX_ADMITTED_TOKENS
from draftwood.serve import ServerOptions, bodies, connections, requests
from draftwood.serve.connections import RESERVED_FILES, ConnectionLimits
from draftwood.serve.logs import MAX_REPEATS, limit_repeats
from draftwood.text import chat, template_worker
from tests.tools.paths import ROOT
from tests.tools.serve import NAME, TIMEOUT_SECONDS, Running, eventually, raw_request, serving, user_message

SHORT = 0.3  # seconds
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    """A server that does not wait for long."""
    with serving({"client_seconds": SHORT}) as server:
        yield server


def read_all(connection: socket.socket) -> bytes:
    """What the server sends before it closes the connection; times out if it does not."""
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed the connection, shown by sending it a byte."""
    try:
        connection.sendall(b" ")
    except OSError:
        return True
    return False


def all_is_released(server: Running) -> bool:
    """The connection of this question is the only one."""
    counts = [server.gauge(name) for name in ("open_samples", "held_body_bytes", "open_connections")]
    return counts == [0, 0, 1]


@pytest.mark.parametrize("sent", [b"", b"GET", HEAD, HEAD + b"a: b"])
def test_headers_must_arrive_in_time(hasty: Running, sent: bytes) -> None:
    with hasty.connect(sent) as connection:
        assert read_all(connection) == b""
    assert eventually(lambda: all_is_released(hasty))


def test_the_time_for_headers_does_not_start_again_with_every_byte(hasty: Running) -> None:
    with hasty.connect() as connection:
        stop = threading.Event()

        def trickle() -> None:
            while not stop.wait(SHORT / 10):
                try:
                    connection.sendall(b"G")
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        assert read_all(connection) == b""
        stop.set()
        thread.join()


def test_bodies_must_arrive_in_time(hasty: Running) -> None:
    with hasty.connect(raw_request(b'{"model"', length=1000)) as connection:
        assert b"408" in (found := read_all(connection)).splitlines()[0]
    assert b"request_timeout" in found
    assert eventually(lambda: all_is_released(hasty))


def test_a_connection_whose_request_was_refused_early_is_closed(hasty: Running) -> None:
    """Even if the rest of the body keeps arriving, byte by byte."""
    with hasty.connect(raw_request(b"{", length=10**6).replace(b"/v1/chat/completions", b"/nowhere")) as connection:
        assert b"404" in connection.recv(1000)
        assert eventually(lambda: is_closed(connection))


def test_a_client_that_does_not_read_is_disconnected(hasty: Running) -> None:
    fields = {"model": NAME, "messages": user_message("a"), "max_tokens": 3500, "ignore_eos": True, "stream": True}
    fields |= {"logprobs": True, "top_logprobs": 20}
    with ExitStack() as stack:
        connection = stack.enter_context(socket.socket())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = hasty.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        connection.sendall(raw_request(json.dumps(fields).encode()))
        assert eventually(lambda: hasty.gauge("open_samples") == 1)
        assert eventually(lambda: all_is_released(hasty))


def test_a_request_that_takes_longer_than_the_client_may_is_served(hasty: Running) -> None:
    """The limit is for clients. Generating may take as long as it needs."""
    slow = threading.Event()
    step = hasty.llm.engine.step
    try:
        hasty.llm.engine.step = lambda *args: (slow.wait(SHORT * 2), slow.set(), step(*args))[2]  # type: ignore[method-assign]
        assert hasty.chat(max_tokens=2).status == 200
    finally:
        del hasty.llm.engine.step


def test_idle_connections_make_room_for_others() -> None:
    with serving({"max_connections": 4, "max_connections_per_address": 4}) as server, ExitStack() as stack:
        idle = [stack.enter_context(server.connect(HEAD)) for _ in range(20)]
        assert server.request("/health").status == 200
        assert server.chat(max_tokens=2).status == 200
        assert server.gauge("open_connections") <= 4
        assert [read_all(connection) for connection in idle[:16]] == [b""] * 16
        idle[-1].sendall(b"\r\n")
        assert b"200 OK" in idle[-1].recv(1000)


def test_half_sent_bodies_make_room_for_others() -> None:
    with serving({"max_connections": 4}) as server, ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(server.connect(raw_request(b"{", length=1000)))
        assert server.chat(max_tokens=2).status == 200


def test_connections_with_a_running_request_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({"max_connections": 2}) as server, ExitStack() as stack:
        gate, step = threading.Event(), server.llm.engine.step
        monkeypatch.setattr(server.llm.engine, "step", lambda *args: (gate.wait(TIMEOUT_SECONDS), step(*args))[1])
        body = json.dumps({"messages": user_message("a"), "max_tokens": 2}).encode()
        running = [stack.enter_context(server.connect(raw_request(body))) for _ in range(2)]
        assert eventually(lambda: len(server.llm.engine._scheduler.running) == 2 or server.llm.engine.has_work)
        refused = read_all(stack.enter_context(server.connect()))
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert json.loads(refused.split(b"\r\n\r\n")[1])["error"]["code"] == "server_busy"
        gate.set()
        assert all(b"200 OK" in connection.recv(1000) for connection in running)
        assert eventually(lambda: server.request("/health").status == 200)
        assert 'draftwood_requests_total{path="other",status="503"} 1.0\n' in server.request("/metrics").text


def test_each_address_has_its_own_limit() -> None:
    class Fake:
        def __init__(self, address: str, is_waiting: bool = True) -> None:
            self.address, self.is_waiting, self.transport = address, is_waiting, self
            self.is_open = True

        def abort(self) -> None:
            self.is_open = False

    limits = ConnectionLimits(4, 2, 1.0)
    crowd = [Fake("a") for _ in range(5)]
    other = [Fake("b"), Fake("b", is_waiting=False)]
    admitted = [limits.admit(each) for each in (*other, *crowd)]  # type: ignore[arg-type]
    assert all(admitted)
    assert [each.is_open for each in crowd] == [False] * 3 + [True] * 2
    assert all(each.is_open for each in other)
    busy = [Fake("c", is_waiting=False) for _ in range(3)]
    assert [limits.admit(each) for each in busy] == [True, True, False]  # type: ignore[arg-type]
    assert other[1].is_open


def test_connections_fit_into_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert connections._fit_open_files(512) == 512
    assert not asked
    assert connections._fit_open_files(2000) == 2000
    assert connections._fit_open_files(5000) == 4096 - RESERVED_FILES
    assert asked == [(2000 + RESERVED_FILES, 4096), (4096, 4096)]


FLOOD = """
    import resource, sys, time
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
    from tests.tools.serve import serving
    with serving() as server:
        print(server.url, flush=True)
        sys.stdin.readline()
        for attempt in range(100):  # the client, in the same process, needs a file too
            try:
                assert server.request("/health").status == 200
            except OSError:
                time.sleep(0.1)
            else:
                print("healthy", flush=True)
                break
"""


def test_more_connections_than_open_files() -> None:
    """The server goes on and writes no flood of tracebacks."""
    command = [sys.executable, "-c", textwrap.dedent(FLOOD)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process, ExitStack() as stack:
        assert process.stdin is not None
        assert process.stdout is not None
        host, port = process.stdout.readline().strip().removeprefix("http://").split(":")
        for _ in range(600):
            stack.enter_context(socket.create_connection((host, int(port)), TIMEOUT_SECONDS))
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "healthy\n"
        stack.close()
        _, log = process.communicate(timeout=TIMEOUT_SECONDS)
    assert len(log) < 20_000


def test_bodies_are_limited_by_the_context(hasty: Running) -> None:
    limit = max(bodies.MIN_BODY_BYTES, bodies.BYTES_PER_TOKEN * hasty.llm.info.context_length)
    assert hasty.request("/v1/completions", b" " * limit).error["code"] == "invalid_json"
    with hasty.connect(raw_request(b"", length=limit + 1)) as connection:
        assert b"413" in connection.recv(1000).splitlines()[0]
    chunks = b"%x\r\n%s\r\n" % (limit + 1, b" " * (limit + 1))
    head = raw_request(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with hasty.connect(head + chunks) as connection:
        assert b"413" in connection.recv(1000).splitlines()[0]


def test_half_sent_bodies_share_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is given up; new requests are served."""
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", 100_000)
    with serving() as server, ExitStack() as stack:
        sent = raw_request(b" " * 40_000, length=50_000)
        halves = [stack.enter_context(server.connect(sent)) for _ in range(6)]
        assert [b"408" in read_all(each).splitlines()[0] for each in halves[:4]] == [True] * 4
        assert 0 < server.gauge("held_body_bytes") <= 100_000
        assert server.chat(max_tokens=2).status == 200
        halves[-1].sendall(b" " * 10_000)
        assert b"400 Bad Request" in halves[-1].recv(1000)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,  # TLS
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        HEAD + b"a: " + b"x" * 70_000,
        HEAD + b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        raw_request(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"zz\r\n",
        raw_request(b"").replace(b"Content-Length: 0", b"Content-Length: 1, 2"),
        raw_request(b"").replace(b"Content-Length: 0", b"Content-Length: " + b"9" * 5000),
        (HEAD + b"\r\n") * 300,  # pipelined
    ],
    ids=lambda sent: repr(sent[:30]),
)
def test_odd_connections(hasty: Running, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with hasty.connect(sent) as connection:
        found = read_all(connection)
    assert b" 500 " not in found
    assert "Traceback" not in caplog.text
    assert hasty.request("/health").status == 200


def test_bad_chunks_after_the_response_began(hasty: Running, caplog: pytest.LogCaptureFixture) -> None:
    head = raw_request(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with hasty.connect(head.replace(b"/v1/chat/completions", b"/nowhere")) as connection:
        assert b"404" in connection.recv(1000)
        connection.sendall(b"zz\r\n")
        read_all(connection)
    assert "Traceback" not in caplog.text


def test_the_documented_limits_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    options = ServerOptions(names=("a",))
    for row in (
        f"| connections | {options.max_connections}, or",
        f"| {options.client_seconds:g} s each | `--client-timeout` |",
        f"| headers of a request | {DEFAULT_MAX_INCOMPLETE_EVENT_SIZE >> 10} KiB |",
        f"| {bodies.BYTES_PER_TOKEN} bytes per token of the context, {bodies.MIN_BODY_BYTES >> 10} KiB to "
        f"{bodies.MAX_BODY_BYTES >> 20} MiB |",
        f"| {bodies.MAX_HELD_BYTES >> 20} MiB; the oldest",
        f"| {requests.MAX_CHARACTERS_PER_TOKEN} characters per token of the context",
        f"| tokens of a prediction | {requests.MAX_PREDICTION_TOKENS:,} |",
        f"| {MAX_ADMITTED_TOKENS:,} tokens, or one request |",
        f"| {requests.MAX_STOPS}, of {requests.MAX_STOP_CHARACTERS} characters |",
        f"| stop tokens | {requests.MAX_STOP_TOKENS} |",
        f"| {requests.MAX_TOP_LOGPROBS} per token, {requests.MAX_LOGPROBS:,} per response |",
        f"| temperature | 0 to {MAX_TEMPERATURE:g} |",
        f"| presence and frequency penalty | -{MAX_PENALTY:g} to {MAX_PENALTY:g} |",
        f"| repetition penalty | {1 / MAX_PENALTY:g} to {MAX_PENALTY:g} |",
        f"| time of a chat template | {chat.MAX_SECONDS:g} s |",
        f"| {template_worker.MAX_BYTES >> 30} GiB, {template_worker.MAX_CHARACTERS:,} characters of output |",
        f"| equal log messages | {MAX_REPEATS} per minute |",
    ):
        assert row in text


def test_log_messages_do_not_repeat_without_bound(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("asyncio")
    now = [0.0]
    monkeypatch.setattr("draftwood.serve.logs.monotonic", lambda: now[0])
    with limit_repeats():
        for number in range(100):
            log.warning("no more files, %d", number)
        log.warning("something else")
        assert len(caplog.records) == MAX_REPEATS + 1
        now[0] += 100
        log.warning("no more files, %d", 100)
        assert caplog.records[-1].getMessage() == f"no more files, 100 ({100 - MAX_REPEATS} more in the last minutes)"
    log.warning("something else")
    assert caplog.records[-1].message == "something else"
