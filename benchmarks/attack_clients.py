"""The clients of ``attack.py``: each does one kind of harm to a server, or reads what it answers."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

NUM_IDLE, NUM_SLOW = 1300, 64
ANSWER_SECONDS = 120.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

NUMBERS = [0, 1, -1, 0.5, 2**31, 2**64, -(2**64), 10**400, 1e308, -1e308, 1e-308, float("nan"), float("inf")]
ODD_VALUES = [
    *NUMBERS, None, True, False, "", "text", "\ud83d", "\0", "x" * 100_000, [], {}, [[]], [None], [""], ["a"] * 1000,
    [[1, 2], [3]], [0] * 20_000, [10**30], {"type": "content"}, {"type": "content", "content": "word " * 20_000},
    [{"role": "user", "content": "hello"}] * 9000, [{"role": "user", "content": "some words " * 100}] * 200,
    [{"role": "tool"}], [{"role": "user", "content": [{"type": "text", "text": 3}]}],
]  # fmt: skip
FIELDS = [
    "model", "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "stream", "user",
    "stream_options", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "presence_penalty", "suffix",
    "frequency_penalty", "repetition_penalty", "stop_token_ids", "ignore_eos", "prediction", "drafter", "tools", "echo",
    "logit_bias", "response_format", "best_of", "unknown",
]  # fmt: skip
HEADERS = [
    "", "content-type: text/plain\r\n", "a: " + "b" * 70_000 + "\r\n", "host: evil\r\n", "expect: 100-continue\r\n",
    "upgrade: websocket\r\nconnection: upgrade\r\n", "transfer-encoding: chunked\r\n", "authorization: x\r\n", "\0\r\n",
]  # fmt: skip
BODIES = [
    b"",
    b"{",
    b"[1]",
    b"null",
    b"\xff\xfe",
    b"[" * 50_000,
    b'{"a":' * 50_000,
    b'{"n": ' + b"1" * 5000 + b"}",
    b"0" * 3_000_000,
]


class Server:
    """Speaks HTTP without a library, so that requests can be wrong in any way."""

    def __init__(self, url: str) -> None:
        self._host, self._port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        if self._host not in ("127.0.0.1", "localhost", "::1"):
            sys.exit(f"attack.py only attacks this machine, not {self._host}")
        self.statuses: Counter[str] = Counter()

    async def connect(self, buffer: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """``buffer``: bytes that the system holds for this client."""
        if buffer is None:
            return await asyncio.open_connection(self._host, self._port)
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        connection = socket.socket(family)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (self._host, self._port))
        return await asyncio.open_connection(sock=connection, limit=buffer)

    async def ask(self, head: str, body: bytes = b"", headers: str = "content-type: application/json\r\n") -> bytes:
        """Send a request on a connection of its own. Returns the response; its status is counted."""
        writer = None
        found = b""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reader, writer = await self.connect()
                writer.write(request_bytes(head, body, headers=headers + "connection: close\r\n"))
                found = await reader.read()
        except (OSError, TimeoutError) as error:
            found = found or type(error).__name__.encode()
        finally:
            if writer is not None:
                writer.close()
        match = re.match(rb"HTTP/1.1 (\d+)", found)
        self.statuses[
            match[1].decode() if match else "closed" if not found else found[:30].decode(errors="replace")
        ] += 1
        return found

    async def get_gauges(self) -> dict[str, float]:
        found = re.findall(r"^draftwood_(\w+) (\S+)$", (await self.ask("GET /metrics")).decode(), re.MULTILINE)
        return {name: float(value) for name, value in found}

    async def get_responses(self) -> Counter[str]:
        """The server's own count of its responses by status: it includes those that no client read."""
        text = (await self.ask("GET /metrics")).decode()
        counts: Counter[str] = Counter()
        for status, value in re.findall(r'^draftwood_requests_total\{.*status="(\d+)"\} (\S+)$', text, re.MULTILINE):
            counts[status] += int(float(value))
        return counts


def request_bytes(head: str, body: bytes = b"", length: int | None = None, headers: str = "") -> bytes:
    size = len(body) if length is None else length
    return (
        f"{head} HTTP/1.1\r\nhost: localhost\r\n{headers}content-length: {size}\r\n\r\n".encode("utf-8", "replace")
        + body
    )


def chat_body(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "Count from one to twenty."}]
    return json.dumps({"messages": messages, "max_tokens": 4, **fields}).encode()


def choose_value(field: str, rng: random.Random) -> Any:
    """An odd value, but none that makes a valid request of thousands of tokens: attacks are bounded."""
    while True:
        value = rng.choice(ODD_VALUES)
        if not field.startswith("max_") or (value is not None and not (isinstance(value, int) and value > 8)):
            return value


async def send_odd_requests(server: Server, rng: random.Random, count: int, num_clients: int) -> None:
    """Each has one to three odd fields, or an odd body, path, method or header. Valid ones generate a few tokens."""
    turns = asyncio.Semaphore(num_clients)

    async def send() -> None:
        async with turns:
            kind = rng.random()
            if kind < 0.8:
                fields = {name: choose_value(name, rng) for name in rng.sample(FIELDS, rng.randint(1, 3))}
                if rng.random() < 0.02:
                    fields["x" * rng.choice((10, 100_000))] = 1
                if rng.random() < 0.5:
                    await server.ask(f"POST {CHAT}", chat_body(**fields))
                else:
                    body = json.dumps({"prompt": "One two", "max_tokens": 4, **fields}).encode()
                    await server.ask(f"POST {COMPLETIONS}", body)
            elif kind < 0.9:
                await server.ask(f"POST {rng.choice((CHAT, COMPLETIONS))}", rng.choice(BODIES))
            elif kind < 0.95:
                path = rng.choice(
                    ("/", "/nowhere", "/v1/models/x", "/" + "x" * 50_000, "/%00%ff", f"{CHAT}?a=b", "*", "x")
                )
                await server.ask(f"{rng.choice(('GET', 'POST', 'PUT', 'HEAD', 'OPTIONS', 'BREW'))} {path}", chat_body())
            else:
                await server.ask(f"POST {CHAT}", chat_body(), rng.choice(HEADERS))

    await asyncio.gather(*(send() for _ in range(count)))


async def leave_early(server: Server, rng: random.Random) -> None:
    """Send a request or a part of it, and disconnect within two seconds."""
    writer = None
    with suppress(OSError, TimeoutError):
        reader, writer = await server.connect()
        body = chat_body(stream=rng.random() < 0.7, max_tokens=200, ignore_eos=True, n=rng.randint(1, 2))
        whole = request_bytes(f"POST {CHAT}", body, headers="content-type: application/json\r\n")
        writer.write(whole if rng.random() < 0.8 else whole[: rng.randrange(len(whole))])
        async with asyncio.timeout(rng.uniform(0.0, 2.0)):
            found = await reader.read(rng.randint(1, 5000))
            server.statuses[found[9:12].decode(errors="replace")] += 1
    if writer is not None and rng.random() < 0.5:
        writer.transport.abort()
    elif writer is not None:
        writer.close()


async def read_slowly(server: Server, rng: random.Random) -> None:
    """Ask for a long response and read it in small parts, with pauses, into a small buffer."""
    with suppress(OSError, TimeoutError):
        reader, writer = await server.connect(buffer=4096)
        body = chat_body(stream=True, max_tokens=48, ignore_eos=True, logprobs=True, top_logprobs=20)
        writer.write(request_bytes(f"POST {CHAT}", body, headers="content-type: application/json\r\n"))
        async with asyncio.timeout(ANSWER_SECONDS):
            last = b""
            while b"[DONE]" not in last and (part := await reader.read(8192)):
                last = last[-16:] + part
                await asyncio.sleep(rng.uniform(0.0, 0.2))
        writer.close()


class AnswerTimes(NamedTuple):
    """Seconds from the request to the first token and to the end of an answer."""

    first: float
    whole: float


async def read_answer(server: Server, rng: random.Random) -> AnswerTimes | None:
    """Read one streamed answer; None if there was none."""
    started = time.monotonic()
    with suppress(OSError, TimeoutError, EOFError):
        reader, writer = await server.connect()
        body = chat_body(stream=True, max_tokens=rng.randint(16, 48), ignore_eos=True, seed=rng.randrange(100))
        writer.write(request_bytes(f"POST {CHAT}", body, headers="content-type: application/json\r\n"))
        async with asyncio.timeout(ANSWER_SECONDS):
            found = await reader.readuntil(b'{"content": "')
            first = time.monotonic() - started
            server.statuses[found[9:12].decode(errors="replace")] += 1
            await reader.readuntil(b"[DONE]")
        writer.close()
        return AnswerTimes(first, time.monotonic() - started)
    return None


async def disconnect_at_random(server: Server, rng: random.Random, num_clients: int, seconds: float) -> None:
    end = time.monotonic() + seconds

    async def run_client() -> None:
        while time.monotonic() < end:
            await leave_early(server, rng)

    await asyncio.gather(*(run_client() for _ in range(num_clients)))


async def mix_clients(
    server: Server, rng: random.Random, num_clients: int, seconds: float, times: list[AnswerTimes]
) -> None:
    """Most clients read their answers, whose times are noted; the others leave early or read slowly."""
    end = time.monotonic() + seconds

    async def run_client() -> None:
        while time.monotonic() < end:
            kind = rng.random()
            if kind < 0.6:
                found = await read_answer(server, rng)
                times.extend([] if found is None else [found])
            else:
                await (leave_early if kind < 0.9 else read_slowly)(server, rng)

    await asyncio.gather(*(run_client() for _ in range(num_clients)))


async def send_slowly(server: Server, rng: random.Random, seconds: float) -> None:
    """Bodies that arrive byte by byte, headers that do, and bodies of which only a part arrives."""
    end = time.monotonic() + seconds

    async def trickle(number: int) -> None:
        while time.monotonic() < end:
            writer = None
            with suppress(OSError):
                _, writer = await server.connect()
                body = b" " * 200_000
                sent = request_bytes(f"POST {CHAT}", body, len(body) + 1, headers="content-type: application/json\r\n")
                rest = sent[:40] if number % 3 == 0 else sent[:-190_000] if number % 3 == 1 else sent
                writer.write(rest)
                while time.monotonic() < end:
                    if number % 2:
                        writer.write(b" ")
                        await writer.drain()
                    await asyncio.sleep(rng.uniform(0.1, 1.0))
            if writer is not None:
                writer.transport.abort()

    await asyncio.gather(*(trickle(number) for number in range(NUM_SLOW)))


async def stay_idle(server: Server, seconds: float) -> None:
    """Open more connections than the server admits, and send nothing, or half of a request line."""
    writers = []
    for number in range(NUM_IDLE):
        with suppress(OSError):
            _, writer = await server.connect()
            writer.write(b"GET /health" if number % 2 else b"")
            writers.append(writer)
    await asyncio.sleep(seconds)
    for writer in writers:
        writer.transport.abort()
