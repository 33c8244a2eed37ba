"""What the two generation endpoints share: from the request's fields to a response or an event stream."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import ClassVar, Generic, NamedTuple, TypeVar

from starlette.endpoints import HTTPEndpoint
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from draftwood.engine import TokenEvent
from draftwood.errors import DraftwoodError
from draftwood.serve.errors import SHUTTING_DOWN, ApiError, InternalError, ServerBusyError
from draftwood.serve.logs import LOG
from draftwood.serve.requests import (
    MAX_PREDICTION_TOKENS,
    Fields,
    RequestLimits,
    RequestOptions,
    check_model,
    check_samples,
    parse_body,
    parse_options,
    too_long,
)
from draftwood.serve.responses import (
    DONE_EVENT,
    EventStreamResponse,
    ResponseBuilder,
    SampleOutput,
    encode_event,
    json_response,
    summarize,
)
from draftwood.serve.runner import GenerationJob
from draftwood.serve.state import CLIENT, NOTES, ServerState, get_state
from draftwood.serve.structured import compile_structure
from draftwood.serve.tools import ToolReader, Tools, bind_answer, format_of, mark_of
from draftwood.text import TextCodec

IGNORED_HEADER = "x-draftwood-warning"

PromptT = TypeVar("PromptT")
SampleEvents = AsyncGenerator[tuple[SampleOutput, TokenEvent], None]


class Order(NamedTuple):
    """A parsed request."""

    model: str
    options: RequestOptions
    jobs: list[GenerationJob]  # one per prompt


class GenerationEndpoint(HTTPEndpoint, Generic[PromptT]):
    """Subclasses define what a prompt is."""

    is_chat: ClassVar[bool]
    prompt_field: ClassVar[str]

    @abstractmethod
    def parse_prompts(self, fields: Fields, limits: RequestLimits) -> list[PromptT]:
        """Read and check the prompts of a request."""

    @abstractmethod
    def encode(self, prompt: PromptT, codec: TextCodec) -> list[int]:
        """Convert a prompt to token ids."""

    @property
    def _state(self) -> ServerState:
        return get_state(self.scope)

    async def post(self, request: Request) -> Response:
        body = await self._state.bodies.read(request)
        order = await asyncio.to_thread(self._parse, body)
        num_samples = order.options.params.n
        size = len(order.jobs) * num_samples
        samples = [SampleOutput(index, index // num_samples, self._tool_reader(order.options)) for index in range(size)]
        builder = ResponseBuilder(order.model, self._state.llm.tokenizer, is_chat=self.is_chat)
        headers = _warn_of_ignored(order.options.ignored)
        events = self._generate(request, order.jobs, samples)
        if order.options.stream:
            return EventStreamResponse(self._stream(events, samples, builder, order.options), headers)
        async for _ in events:
            pass
        return await asyncio.to_thread(lambda: json_response(builder.response(samples), 200, headers))

    def _tool_reader(self, options: RequestOptions) -> ToolReader | None:
        if options.tools is None:
            return None
        return ToolReader(format_of(self._state.llm.tokenizer.tool_template), parallel=options.tools.parallel)

    def _parse(self, body: bytes) -> Order:
        """Runs in a thread: texts may be long. Checks first what needs no encoding, which takes longest."""
        state = self._state
        llm, limits, fields = state.llm, state.limits, parse_body(body)
        model = check_model(fields.get("model"), state.options.names)
        options = parse_options(fields, limits, is_chat=self.is_chat)
        if options.tools is not None:
            options = _bind_to_tools(options, options.tools, llm.tokenizer)
        prompts = self.parse_prompts(fields, limits)
        check_samples(len(prompts), options.params, limits, self.prompt_field)
        compile_structure(llm, options.params, fields)
        owner = "" if state.options.share_cache else self.scope[CLIENT]
        try:
            prediction = llm.predicted_ids(options.prediction)
            if len(prediction) > min(limits.context_length, MAX_PREDICTION_TOKENS):
                raise too_long(f"{len(prediction)} tokens", "prediction")
            jobs = []
            for prompt in prompts:
                prompt_ids = self.encode(prompt, llm.tokenizer)
                llm.engine.check(prompt_ids)
                jobs.append(GenerationJob(prompt_ids, options.params, options.drafter, self.is_chat, owner, prediction))
        except DraftwoodError as error:
            raise (error if isinstance(error, ApiError) else ApiError.wrap(error, self.prompt_field)) from error
        return Order(model, options, jobs)

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
        self, events: SampleEvents, samples: Sequence[SampleOutput], builder: ResponseBuilder, options: RequestOptions
    ) -> AsyncGenerator[bytes, None]:
        started: set[int] = set()
        try:
            async with aclosing(events):
                async for sample, event in events:
                    if self.is_chat and sample.index not in started:
                        yield encode_event(builder.first_chunk(sample))
                    started.add(sample.index)
                    yield encode_event(builder.chunk(sample, event))
            if options.include_usage:
                yield encode_event(builder.usage_chunk(samples))
        except ApiError as error:
            if not started:
                raise  # it can still be the response
            yield encode_event(error.body())
        yield DONE_EVENT


def _bind_to_tools(options: RequestOptions, tools: Tools, codec: TextCodec) -> RequestOptions:
    form, params = format_of(codec.tool_template), options.params
    structured = bind_answer(tools, form, params.structured, mark_of(form, codec))
    return options._replace(params=replace(params, structured=structured))


def _warn_of_ignored(names: Sequence[str]) -> dict[str, str]:
    """Log the unknown fields of a request; return a response header that names them."""
    if not names:
        return {}
    text = f"Ignored unknown fields: {', '.join(map(ascii, names))}"
    LOG.warning("%s", text)
    return {IGNORED_HEADER: text}
