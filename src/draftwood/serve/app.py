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
from typing import Any

from draftwood import __version__
from draftwood.drafters import drafter_names
from draftwood.engine import TokenEvent
from draftwood.errors import CONTEXT_LENGTH_EXCEEDED, DraftwoodError
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
from draftwood.serve.runner import CLOSING, BusyError, Job, RefusedError, Runner

LOG = logging.getLogger("draftwood.serve")

CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
HEALTH, METRICS = "/health", "/metrics"
METHODS = {CHAT: "POST", COMPLETIONS: "POST", MODELS: "GET", HEALTH: "GET", METRICS: "GET"}
RETRY_SECONDS = 1
LETTERS = 32  # of a token: texts with more than that for every token of the context do not fit it
MISTAKE = "The server has made a mistake"
GONE = 499  # the status of a client that hung up, as nginx calls it

Queue = asyncio.Queue[tuple[int, TokenEvent | Exception]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    names: tuple[str, ...]  # that the model is known by
    api_key: str | None = None  # that clients have to send
    allow_origin: str | None = None  # of web pages whose scripts may ask; "*": all
    most_samples: int = 256  # that run or wait; more are told to come back


class App:
    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self._llm, self._options = llm, options
        self._runner = Runner(llm, options.most_samples)
        self._metrics = Metrics()
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)

    def close(self) -> None:
        """Ends what still runs."""
        self._runner.close()

    async def _live(self, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):  # a second Ctrl-C
            await receive()
            self._runner.start()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await asyncio.to_thread(self.close)
            await send({"type": "lifespan.shutdown.complete"})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Whatever happens is an answer: errors of the client's with what to do, ours with a line in the log."""
        started, failed = False, None
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
            failed = error
        except asyncio.CancelledError:  # the server ends, and this has taken longer than it can wait
            failed = _busy(BusyError(CLOSING))
        except Exception:
            LOG.exception("%s failed", path)
            failed = HttpError(500, MISTAKE)
        if failed is not None and not started:
            await send_json(counted, failed.status, failed.body(), {**self._shared(), **failed.headers})
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
            alive = self._runner.is_alive
            told = {"status": "ok" if alive else "failed", "version": __version__}
            await send_json(send, 200 if alive else 503, told, self._shared())
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
        jobs = await self._jobs(fields, asked, chat=chat)
        number = asked.params.n
        choices = [Choice(index, index // number) for index in range(len(jobs) * number)]
        queue: Queue = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(index: int, what: TokenEvent | Exception) -> None:
            with suppress(RuntimeError):  # the loop has been closed: nobody waits
                loop.call_soon_threadsafe(queue.put_nowait, (index, what))

        kind, prefix = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")
        answer_id = f"{prefix}-{uuid.uuid4().hex}"
        writer = Writer(kind, answer_id, int(time.time()), str(fields["model"]), self._llm.tokenizer)
        stream = EventStream(send, self._shared())
        try:
            ticket = self._runner.submit(jobs, deliver)
        except BusyError as error:
            raise _busy(error) from error
        gone = asyncio.create_task(until_gone(receive))
        try:
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
            self._runner.cancel(ticket)

    async def _jobs(self, fields: Fields, asked: Asked, *, chat: bool) -> list[Job]:
        """One for each prompt. What could never run, or would take long to find out, is refused at once."""
        conversation = read_messages(fields) if chat else []
        prompts = [] if chat else read_prompts(fields)
        where = "messages" if chat else "prompt"
        most, number = self._options.most_samples, max(len(prompts), 1) * asked.params.n
        if number > most:
            message = f"These are more samples than the server takes\n  got: {number}\n  allowed: at most {most}"
            raise HttpError(400, message, param="n" if len(prompts) <= 1 else "prompt")
        texts = [message["content"] for message in conversation] or [each for each in prompts if isinstance(each, str)]
        most_letters = LETTERS * self._llm.info.context_length
        for text, param in (*((text, where) for text in texts), (asked.prediction, "prediction")):
            if len(text) > most_letters:
                message = f"The text is longer than the context\n  got: {len(text)} letters"
                raise HttpError(400, message, param=param, code=CONTEXT_LENGTH_EXCEEDED)

        def encoded() -> list[Job]:
            codec = self._llm.tokenizer
            ids = (
                [codec.apply_chat(conversation)]
                if chat
                else [each if isinstance(each, list) else codec.encode(each) for each in prompts]
            )
            for prompt_ids in ids:
                self._llm.engine.check(prompt_ids)
            prediction = self._llm.predicted_ids(asked.prediction)
            return [Job(prompt_ids, asked.params, asked.drafter, chat, prediction) for prompt_ids in ids]

        try:
            return await asyncio.to_thread(encoded)
        except DraftwoodError as error:
            raise HttpError(400, str(error), param=where, code=error.code) from error

    async def _events(
        self, queue: Queue, gone: asyncio.Task[None], choices: Sequence[Choice]
    ) -> AsyncIterator[tuple[Choice, TokenEvent]]:
        """Until all samples have ended."""
        left = len(choices)
        while left:
            try:
                index, what = await unless_gone(queue.get(), gone)
            except asyncio.CancelledError:  # the answer has taken longer than a server that ends can wait
                raise _busy(BusyError(CLOSING)) from None
            if isinstance(what, Exception):
                raise _failed(what)
            choices[index].add(what)
            if what.finish_reason is not None:
                left -= 1
                self._metrics.finished(what.stats)
            yield choices[index], what

    async def _stream(
        self,
        stream: EventStream,
        writer: Writer,
        events: AsyncIterator[tuple[Choice, TokenEvent]],
        choices: Sequence[Choice],
        asked: Asked,
        *,
        chat: bool,
    ) -> None:
        has_begun: set[int] = set()
        async for choice, event in events:
            if chat and choice.index not in has_begun:
                has_begun.add(choice.index)
                await stream.event(writer.opening(choice.index))
            await stream.event(writer.chunk(choice, event))
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
        scheme, _, given = header(scope, b"authorization").partition(b" ")
        is_bearer = scheme.lower() == b"bearer"
        if key is not None and not (is_bearer and hmac.compare_digest(given.strip(), key.encode())):
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


def _failed(what: Exception) -> HttpError:
    """What a client is told of an error; ours is in the log."""
    if isinstance(what, BusyError):
        return _busy(what)
    if isinstance(what, RefusedError):
        return HttpError(400, str(what))
    LOG.error("A request failed", exc_info=what)
    return HttpError(500, MISTAKE)
