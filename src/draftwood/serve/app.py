"""The server as an ASGI application: which path does what."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from draftwood import __version__
from draftwood.drafters import drafter_names
from draftwood.engine import TokenEvent
from draftwood.errors import DraftwoodError
from draftwood.llm import LLM
from draftwood.serve.answers import Choice, Writer
from draftwood.serve.http import (
    ClientGoneError,
    EventStream,
    HttpError,
    Receive,
    Scope,
    Send,
    header,
    read_json,
    send_bytes,
    send_json,
    unless_gone,
    until_gone,
)
from draftwood.serve.metrics import Metrics
from draftwood.serve.protocol import Asked, Fields, read_messages, read_model, read_prompts, read_request
from draftwood.serve.runner import CLOSING, BusyError, Job, Runner, Ticket

LOG = logging.getLogger("draftwood.serve")

CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
HEALTH, METRICS = "/health", "/metrics"
METHODS = {CHAT: "POST", COMPLETIONS: "POST", MODELS: "GET", HEALTH: "GET", METRICS: "GET"}
RETRY_SECONDS = 1
GONE = 499  # the status of a client that hung up, as nginx calls it

Queue = asyncio.Queue[tuple[int, TokenEvent | Exception]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    names: tuple[str, ...]  # that the model is known by
    api_key: str | None = None  # that clients have to send
    allow_origin: str | None = None  # of web pages whose scripts may ask; "*": all
    most_requests: int = 256  # that run or wait; more are told to come back


class App:
    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self._llm, self._options = llm, options
        self._runner = Runner(llm, options.most_requests)
        self._metrics = Metrics()
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            stage = (await receive())["type"]
            if stage == "lifespan.startup":
                self._runner.start()
            else:
                await asyncio.to_thread(self._runner.close)
            await send({"type": f"{stage}.complete"})
            if stage == "lifespan.shutdown":
                return

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Whatever happens is an answer: errors of the client's with what to do, ours with a line in the log."""
        started = False
        path, status = scope["path"].rstrip("/") or "/", 0

        async def counted(message: dict[str, Any]) -> None:
            nonlocal started, status
            if message["type"] == "http.response.start":
                started, status = True, message["status"]
            await send(message)

        try:
            await self._route(path, scope, receive, counted)
        except ClientGoneError:
            status = GONE
        except HttpError as error:
            if not started:
                await send_json(counted, error.status, error.body(), {**self._shared(), **error.headers})
        except Exception:
            LOG.exception("%s failed", path)
            if not started:
                await send_json(counted, 500, HttpError(500, "The server has made a mistake").body(), self._shared())
        self._metrics.answered(path if path in METHODS else "other", status)

    async def _route(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        if method == "OPTIONS" and self._options.allow_origin:
            await send_bytes(send, 204, "text/plain", b"", self._shared())
            return
        one_model = path.removeprefix(f"{MODELS}/") if path.startswith(f"{MODELS}/") else None
        allowed = "GET" if one_model else METHODS.get(path)
        if allowed is None:
            raise HttpError(404, f"There is nothing at {path}\n  allowed: {', '.join(METHODS)}")
        if method != allowed and (method, allowed) != ("HEAD", "GET"):
            raise HttpError(405, f"{path} wants {allowed}\n  got: {method}", headers={"allow": allowed})
        if path == HEALTH:
            await send_json(send, 200, {"status": "ok", "version": __version__}, self._shared())
            return
        self._check_key(scope)
        if path == METRICS:
            text = self._metrics.text(self._runner.num_open)
            await send_bytes(send, 200, "text/plain; version=0.0.4", text.encode(), self._shared())
        elif path == MODELS:
            models = [self._model(name) for name in self._options.names]
            await send_json(send, 200, {"object": "list", "data": models}, self._shared())
        elif one_model:
            read_model({"model": one_model}, self._options.names)
            await send_json(send, 200, self._model(one_model), self._shared())
        else:
            await self._answer(await read_json(receive), receive, send, chat=path == CHAT)

    async def _answer(self, fields: Fields, receive: Receive, send: Send, *, chat: bool) -> None:
        read_model(fields, self._options.names)
        context = self._llm.info.context_length
        asked = read_request(fields, chat=chat, context=context, drafters=drafter_names())
        try:
            prompts = await asyncio.to_thread(self._encoded, fields, chat=chat)
        except DraftwoodError as error:
            code = "context_length_exceeded" if "longer" in error.what else None
            raise HttpError(400, str(error), param="messages" if chat else "prompt", code=code) from error
        number = asked.params.n
        choices = [Choice(index, index // number) for index in range(len(prompts) * number)]
        queue: Queue = asyncio.Queue()
        gone = asyncio.create_task(until_gone(receive))
        tickets: list[Ticket] = []
        kind, prefix = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")
        answer_id = f"{prefix}-{uuid.uuid4().hex}"
        writer = Writer(kind, answer_id, int(time.time()), str(fields["model"]), self._llm.tokenizer)
        stream = EventStream(send, self._shared())
        try:
            self._submit(prompts, asked, queue, tickets, reuse=chat)
            events = self._events(queue, gone, choices)
            if asked.stream:
                await self._stream(stream, writer, events, choices, asked, chat=chat)
            else:
                async for _ in events:
                    pass
                await send_json(send, 200, writer.whole(choices), self._shared())
        except HttpError as error:
            if not stream.is_open:
                raise
            await stream.fail(error)
        finally:
            gone.cancel()
            for ticket in tickets:
                self._runner.cancel(ticket)

    def _encoded(self, fields: Fields, *, chat: bool) -> list[list[int]]:
        codec = self._llm.tokenizer
        if chat:
            prompts = [codec.apply_chat(read_messages(fields))]
        else:
            prompts = [each if isinstance(each, list) else codec.encode(each) for each in read_prompts(fields)]
        for prompt_ids in prompts:
            self._llm.engine.check(prompt_ids)
        return prompts

    def _submit(
        self, prompts: Sequence[Sequence[int]], asked: Asked, queue: Queue, tickets: list[Ticket], *, reuse: bool
    ) -> None:
        """Adds to ``tickets`` what was begun: those have to be ended, also where a later one is refused."""
        loop, prediction = asyncio.get_running_loop(), self._llm.predicted_ids(asked.prediction)

        def deliver(first: int, index: int, what: TokenEvent | Exception) -> None:
            with suppress(RuntimeError):  # the loop has been closed: nobody waits
                loop.call_soon_threadsafe(queue.put_nowait, (first + index, what))

        try:
            for number, prompt_ids in enumerate(prompts):
                job = Job(prompt_ids, asked.params, asked.drafter, reuse, prediction)
                tickets.append(self._runner.submit(job, partial(deliver, number * asked.params.n)))
        except BusyError as error:
            raise _busy(error) from error

    async def _events(
        self, queue: Queue, gone: asyncio.Task[None], choices: Sequence[Choice]
    ) -> AsyncIterator[tuple[int, TokenEvent]]:
        """Until all samples have ended."""
        left = len(choices)
        while left:
            try:
                index, what = await unless_gone(queue.get(), gone)
            except asyncio.CancelledError:  # the answer has taken longer than a server that ends can wait
                raise _busy(BusyError(CLOSING)) from None
            if isinstance(what, BusyError):
                raise _busy(what)
            if isinstance(what, DraftwoodError):
                raise HttpError(400, str(what)) from what
            if isinstance(what, Exception):
                raise HttpError(500, "The server has made a mistake") from what
            choices[index].add(what)
            if what.finish_reason is not None:
                left -= 1
                self._metrics.finished(what.stats)
            yield index, what

    async def _stream(
        self,
        stream: EventStream,
        writer: Writer,
        events: AsyncIterator[tuple[int, TokenEvent]],
        choices: Sequence[Choice],
        asked: Asked,
        *,
        chat: bool,
    ) -> None:
        has_begun: set[int] = set()
        async for index, event in events:
            if chat and index not in has_begun:
                has_begun.add(index)
                await stream.event(writer.opening(index))
            await stream.event(writer.chunk(index, event))
        if asked.usage_at_end:
            await stream.event(writer.closing(choices))
        await stream.end()

    def _model(self, name: str) -> dict[str, Any]:
        info = self._llm.info
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "draftwood",
            "max_model_len": info.context_length,
            "drafter": self._llm.drafter,
        }

    def _check_key(self, scope: Scope) -> None:
        key = self._options.api_key
        given = header(scope, "authorization").removeprefix("Bearer ").strip()
        if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
            message = "The API key is wrong" if given else "An API key is wanted\n  allowed: Authorization: Bearer KEY"
            raise HttpError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _shared(self) -> dict[str, str]:
        """Headers of every answer."""
        origin = self._options.allow_origin
        if origin is None:
            return {}
        return {
            "access-control-allow-origin": origin,
            "access-control-allow-methods": "GET, POST, OPTIONS",
            "access-control-allow-headers": "*, authorization, content-type",
        }


def _busy(error: BusyError) -> HttpError:
    return HttpError(503, str(error), code="server_busy", headers={"retry-after": str(RETRY_SECONDS)})
