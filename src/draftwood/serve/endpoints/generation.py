"""What all generation endpoints share: from the request's fields to a response or an event stream."""

import asyncio
import json
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

from starlette.endpoints import HTTPEndpoint
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from draftwood.engine import TokenEvent
from draftwood.errors import DraftwoodError
from draftwood.serve.errors import SHUTTING_DOWN, ApiError, InternalError, ServerBusyError
from draftwood.serve.fields import ApiFields, Fields, check_fields
from draftwood.serve.formats import Order, ResponseFormat, SampleOutput, summarize
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
from draftwood.serve.runner import GenerationJob
from draftwood.serve.state import CLIENT, NOTES, ServerState, get_state
from draftwood.serve.structured import compile_structure
from draftwood.serve.tools import bind_answer, format_of, mark_of
from draftwood.text import TextCodec, Tool

IGNORED_HEADER = "x-draftwood-warning"

PromptT = TypeVar("PromptT")
SampleEvents = AsyncGenerator[tuple[SampleOutput, TokenEvent], None]


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
        async for _ in events:
            pass
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
                jobs.append(job._replace(prompt_ids=prompt_ids))
        except DraftwoodError as error:
            raise (error if isinstance(error, ApiError) else ApiError.wrap(error, self.prompt_field)) from error
        return Order(model, fields, options, jobs), ignored

    async def _generate(
        self, request: Request, jobs: Sequence[GenerationJob], samples: Sequence[SampleOutput]
    ) -> SampleEvents:
        """Run the jobs until all samples have ended. They are cancelled if the client disconnects."""
        queue: asyncio.Queue[tuple[int, TokenEvent | Exception]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(index: int, result: TokenEvent | Exception) -> None:
            with suppress(RuntimeError):  # the event loop is closed: nothing waits for results any more
                loop.call_soon_threadsafe(queue.put_nowait, (index, result))

        async def watch_connection() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            queue.put_nowait((0, ClientDisconnect()))

        runner = self._state.runner
        ticket = runner.submit(jobs, deliver)
        submitted = time.monotonic()
        watcher = asyncio.create_task(watch_connection())
        try:
            num_running = len(samples)
            while num_running:
                index, event = await queue.get()
                if isinstance(event, ApiError | ClientDisconnect):
                    raise event
                if isinstance(event, DraftwoodError) and event.param is not None:
                    raise ApiError.wrap(event)  # what the client asked for cannot go on
                if isinstance(event, Exception):
                    LOG.error("A request failed", exc_info=event)
                    raise InternalError from event
                if not samples[index].token_ids:
                    self._state.metrics.count_start(time.monotonic() - submitted, event.stats)
                samples[index].add(event)
                if event.finish_reason is not None:
                    num_running -= 1
                    self._state.metrics.count_sample(event.stats)
                yield samples[index], event
        except asyncio.CancelledError:  # the request outlived the grace period of a shutdown
            raise ServerBusyError(SHUTTING_DOWN) from None
        finally:
            watcher.cancel()
            runner.cancel(ticket)
            self.scope[NOTES].update(summarize(samples))

    async def _stream(
        self, events: SampleEvents, samples: Sequence[SampleOutput], answer: ResponseFormat
    ) -> AsyncGenerator[bytes, None]:
        started: set[int] = set()
        try:
            async with aclosing(events):
                async for sample, event in events:
                    if sample.index not in started:
                        started.add(sample.index)
                        for part in answer.begin(sample):
                            yield part
                    for part in answer.add(sample, event, samples):
                        yield part
            for part in answer.end(samples):
                yield part
        except ApiError as error:
            if not started:
                raise  # it can still be the response
            for part in answer.fail(error):
                yield part


def bind_to_tools(options: RequestOptions, codec: TextCodec) -> RequestOptions:
    """The options with what the answer must match, and with the format of calls."""
    tools, params = options.tools, options.params
    if tools is None:
        return options
    form = format_of(codec.tool_template)
    structured = bind_answer(tools, form, params.structured, mark_of(form, codec))
    return options._replace(params=replace(params, structured=structured), tools=replace(tools, form=form))


def _warn_of_ignored(names: Sequence[str]) -> dict[str, str]:
    """Log the unknown fields of a request; return a response header that names them."""
    if not names:
        return {}
    text = f"Ignored unknown fields: {', '.join(map(ascii, names))}"
    LOG.warning("%s", text)
    return {IGNORED_HEADER: text}
