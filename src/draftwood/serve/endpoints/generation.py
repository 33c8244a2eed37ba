"""What all generation endpoints share: from the request's fields to a response or an event stream."""

import asyncio
import json
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

from starlette.endpoints import HTTPEndpoint
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from draftwood.engine import TokenEvent
from draftwood.errors import DraftwoodError
from draftwood.serve.errors import SHUTTING_DOWN, ApiError, InternalError, ServerBusyError
from draftwood.serve.fields import ApiFields, Fields, check_fields
from draftwood.serve.formats import Order, ResponseFormat, SampleOutput, is_last, summarize
from draftwood.serve.logs import LOG
from draftwood.serve.requests import (
    MAX_PREDICTION_TOKENS,
    RequestLimits,
    RequestOptions,
    check_length,
    check_model,
    check_samples,
    parse_body,
    parse_options,
    too_long,
)
from draftwood.serve.responses import EventStreamResponse, json_response
from draftwood.serve.runner import GenerationJob, Result
from draftwood.serve.state import CLIENT, NOTES, ServerState, get_state
from draftwood.serve.structured import compile_structure
from draftwood.serve.thoughts import CLOSE, OPEN, bind_after_thoughts, thinking_of
from draftwood.serve.tools import bind_answer, format_of, marks_of, special_marks
from draftwood.text import TextCodec, Tool

IGNORED_HEADER = "x-draftwood-warning"

PromptT = TypeVar("PromptT")
NewEvents = AsyncGenerator[Sequence[tuple[int, TokenEvent]], None]  # by sample, those that came together


class GenerationEndpoint(HTTPEndpoint, Generic[PromptT]):
    """Subclasses define what a prompt is, and how requests and responses look."""

    api: ClassVar[ApiFields]
    is_chat: ClassVar[bool]
    prompt_field: ClassVar[str]

    @abstractmethod
    def parse_prompts(self, fields: Fields, limits: RequestLimits) -> list[PromptT]:
        """Read and check the prompts of a request."""

    @abstractmethod
    def encode(self, prompt: PromptT, codec: TextCodec, tools: Sequence[Tool]) -> list[int]:
        """Convert a prompt to token ids, with the tools that it offers."""

    @abstractmethod
    def new_format(self, order: Order, codec: TextCodec) -> ResponseFormat:
        """What the response to a request is built with."""

    def translate(self, fields: Fields) -> Fields:
        """The fields of a request under the names of OpenAI's chats."""
        return fields

    @property
    def _state(self) -> ServerState:
        return get_state(self.scope)

    async def post(self, request: Request) -> Response:
        body = await self._state.bodies.read(request)
        order, ignored = await asyncio.to_thread(self._parse, body)
        samples = order.new_samples()
        answer = self.new_format(order, self._state.llm.tokenizer)
        headers = _warn_of_ignored(ignored)
        events = self._generate(request, order.jobs, samples)
        if order.options.stream:
            return EventStreamResponse(self._stream(events, samples, answer), headers)
        async for batch in events:
            for index, event in batch:
                samples[index].add(event)
        return await asyncio.to_thread(lambda: json_response(answer.whole(samples), 200, headers))

    def _parse(self, body: bytes) -> tuple[Order, Sequence[str]]:
        """Runs in a thread: texts may be long. Checks first what needs no encoding, which takes longest.

        Also returns the names of ignored fields.
        """
        state = self._state
        llm, limits, fields = state.llm, state.limits, parse_body(body)
        model = check_model(fields.get("model"), state.options.names)
        ignored = check_fields(fields, self.api, limits.strict)
        options = parse_options(self.translate(fields), limits, is_chat=self.is_chat)
        tools: Sequence[Tool] = () if options.tools is None else options.tools.definitions
        check_length(len(json.dumps(tools)), limits, "tools")
        options = bind_to_tools(options, llm.tokenizer)
        prompts = self.parse_prompts(fields, limits)
        check_samples(len(prompts), options.params, limits, self.prompt_field)
        compile_structure(llm, options.params, fields)
        owner = "" if state.options.share_cache else self.scope[CLIENT]
        try:
            llm.factory(options.drafter)  # loads it here: other requests go on
            prediction = llm.predicted_ids(options.prediction)
            if len(prediction) > min(limits.context_length, MAX_PREDICTION_TOKENS):
                raise too_long(f"{len(prediction)} tokens", "prediction")
            job = GenerationJob(
                (),
                options.params,
                options.drafter,
                True,  # prompts with a common beginning share its cache
                owner,
                prediction,
                options.budget,
                options.stream and options.include_cycles,
            )
            jobs = []
            for prompt in prompts:
                prompt_ids = self.encode(prompt, llm.tokenizer, tools)
                llm.engine.check(prompt_ids)
                if self.is_chat:
                    options = bind_to_thoughts(options, prompt_ids, llm.tokenizer)
                    compile_structure(llm, options.params, fields)
                jobs.append(job._replace(prompt_ids=prompt_ids, params=options.params))
        except DraftwoodError as error:
            raise (error if isinstance(error, ApiError) else ApiError.wrap(error, self.prompt_field)) from error
        return Order(model, fields, options, jobs), ignored

    async def _generate(
        self, request: Request, jobs: Sequence[GenerationJob], samples: Sequence[SampleOutput]
    ) -> NewEvents:
        """Run the jobs until all samples have ended. They are cancelled if the client disconnects."""
        inbox = Inbox()

        async def watch_connection() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            inbox.put(0, ClientDisconnect())

        runner, metrics = self._state.runner, self._state.metrics
        ticket = runner.submit(jobs, inbox.put)
        submitted = time.monotonic()
        watcher = asyncio.create_task(watch_connection())
        try:
            waiting, num_running = set(range(len(samples))), len(samples)
            while num_running:
                events, error = await inbox.take()
                for index, event in events:
                    if index in waiting:
                        waiting.remove(index)
                        metrics.count_start(time.monotonic() - submitted, event.stats)
                    if event.finish_reason is not None:
                        num_running -= 1
                        metrics.count_sample(event.stats)
                if events:
                    yield events
                if error is not None:
                    raise _explain(error)
        except asyncio.CancelledError:  # the request outlived the grace period of a shutdown
            raise ServerBusyError(SHUTTING_DOWN) from None
        finally:
            watcher.cancel()
            runner.cancel(ticket)
            self.scope[NOTES].update(summarize(samples))

    async def _stream(
        self, events: NewEvents, samples: Sequence[SampleOutput], answer: ResponseFormat
    ) -> AsyncGenerator[bytes, None]:
        started: set[int] = set()
        parts: list[bytes] = []  # sent together
        try:
            async with aclosing(events):
                async for batch in events:
                    for index, event in batch:
                        sample = samples[index]
                        sample.add(event)
                        if index not in started:
                            started.add(index)
                            parts += answer.begin(sample)
                        parts += answer.add(sample, event, samples)
                    if not is_last(samples):  # else the end follows at once
                        yield b"".join(parts)
                        parts.clear()
            parts += answer.end(samples)
        except ApiError as error:
            if not started:
                raise  # it can still be the response
            parts += answer.fail(error)
        yield b"".join(parts)


def bind_to_thoughts(options: RequestOptions, prompt_ids: Sequence[int], codec: TextCodec) -> RequestOptions:
    """The options for a model that thinks before its answer: a structure binds what follows."""
    thinking, params = thinking_of(prompt_ids, codec), options.params
    if thinking == "no":
        return options
    if params.structured is not None:
        params = replace(params, structured=bind_after_thoughts(params.structured, thinking, codec))
    if not options.splits_thoughts:
        return options._replace(params=params)
    return options._replace(params=params, thinking=thinking, marks=special_marks((OPEN, CLOSE), codec))


class Inbox:
    """Results of one request that its task has not taken yet. For the thread of the event loop."""

    def __init__(self) -> None:
        self._events: list[tuple[int, TokenEvent]] = []
        self._error: Exception | None = None  # the last result
        self._waiter: asyncio.Future[None] | None = None

    def put(self, index: int, result: Result) -> None:
        if isinstance(result, Exception):
            self._error = result
        else:
            self._events.append((index, result))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> tuple[list[tuple[int, TokenEvent]], Exception | None]:
        """Wait for results; return all of them."""
        if not self._events and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, []
        return events, self._error


def _explain(error: Exception) -> Exception:
    """What the client gets to know of an error that ended its request."""
    if isinstance(error, ApiError | ClientDisconnect):
        return error
    if isinstance(error, DraftwoodError) and error.param is not None:
        return ApiError.wrap(error)  # what the client asked for cannot go on
    LOG.error("A request failed", exc_info=error)
    return InternalError()


def bind_to_tools(options: RequestOptions, codec: TextCodec) -> RequestOptions:
    """The options with what the answer must match, and with the format of calls."""
    tools, params = options.tools, options.params
    if tools is None:
        return options
    form = format_of(codec.tool_template)
    marks = marks_of(form, codec)
    structured = bind_answer(tools, form, params.structured, marks)
    tools = replace(tools, form=form, marks=marks)
    return options._replace(params=replace(params, structured=structured), tools=tools)


def _warn_of_ignored(names: Sequence[str]) -> dict[str, str]:
    """Log the unknown fields of a request; return a response header that names them."""
    if not names:
        return {}
    text = f"Ignored unknown fields: {', '.join(map(ascii, names))}"
    LOG.warning("%s", text)
    return {IGNORED_HEADER: text}
