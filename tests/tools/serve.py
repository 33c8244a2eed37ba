"""A server on a real port with a tiny model, for the tests."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from draftwood import LLM
from draftwood.serve import ServerOptions, create_server, listen, server_url
from tests.tools.engine import make_llm

NAME = "tiny"
TIMEOUT_SECONDS = 30.0


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def body(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body["error"]
        return found


class Running(NamedTuple):
    llm: LLM
    url: str

    def request(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, method: str | None = None
    ) -> Reply:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data, sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as found:
                return Reply(found.status, found.headers, found.read().decode())
        except urllib.error.HTTPError as error:
            return Reply(error.code, error.headers, error.read().decode())

    def chat(self, headers: Mapping[str, str] | None = None, **fields: Any) -> Reply:
        body = {"model": NAME, "messages": user_message("hello hello"), **fields}
        return self.request("/v1/chat/completions", body, headers)

    def connect(self, sent: bytes = b"") -> socket.socket:
        """A bare connection."""
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), TIMEOUT_SECONDS)
        connection.sendall(sent)
        return connection

    def gauge(self, name: str) -> float:
        lines = self.request("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"draftwood_{name} "))


def raw_request(body: bytes, length: int | None = None) -> bytes:
    """A chat request as sent over a socket; with ``length``, one that claims a longer body than it sends."""
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def user_message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@contextmanager
def serving(options: Mapping[str, Any] | None = None, **llm_options: Any) -> Iterator[Running]:
    """Run a server in a thread and stop it as a signal would."""
    with make_llm(**llm_options) as llm, listen("127.0.0.1", 0) as listener:
        is_ready = threading.Event()
        server = create_server(llm, ServerOptions(**{"names": (NAME,), **(options or {})}), is_ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert is_ready.wait(TIMEOUT_SECONDS)
            yield Running(llm, server_url(listener))
        finally:
            server.should_exit = True
            thread.join(TIMEOUT_SECONDS)
            assert not thread.is_alive()


def eventually(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + TIMEOUT_SECONDS
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()
