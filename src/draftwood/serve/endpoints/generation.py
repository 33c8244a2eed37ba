"""What the two generation endpoints share: from the request's fields to a response or an event stream."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import ClassVar, Generic, TypeVar

from starlette.endpoints import HTTPEndpoint
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from draftwood.drafters import drafter_names
from draftwood.engine import TokenEvent
from draftwood.errors import DraftwoodError
from draftwood.serve.errors import SHUTTING_DOWN, ApiError, InternalError, ServerBusyError
from draftwood.serve.requests import Fields, RequestOptions, check_length, check_model, parse_options, read_json
from draftwood.serve.responses import (
    DONE_EVENT,
    EventStreamResponse,
    ResponseBuilder,
    SampleOutput,
    encode_event,
    json_response,
)
from draftwood.serve.runner import GenerationJob
from draftwood.serve.state import ServerState, get_state
from draftwood.text import TextCodec

LOG = logging.getLogger("draftwood.serve")
MAX_CHARACTERS_PER_TOKEN = 32  # a text with more characters per token of the context cannot fit, so it is not encoded

PromptT = TypeVar("PromptT")
SampleEvents = AsyncGenerator[tuple[SampleOutput, TokenEvent], None]


class GenerationEndpoint(HTTPEndpoint, Generic[PromptT]):
    """Subclasses define what a prompt is."""

    is_chat: ClassVar[bool]
    prompt_field: ClassVar[str]

    @abstractmethod
    def parse_prompts(self, fields: Fields, max_characters: int) -> list[PromptT]:
        """Read and check the prompts of a request."""

    @abstractmethod
    def encode(self, prompt: PromptT, codec: TextCodec) -> list[int]:
        """Convert a prompt to token ids."""

    @property
    def _state(self) -> ServerState:
        return get_state(self.scope)

    async def post(self, request: Request) -> Response:
        fields, llm = await read_json(request), self._state.llm
        check_model(fields.get("model"), self._state.options.names)
        length = llm.info.context_length
        options = parse_options(fields, is_chat=self.is_chat, context_length=length, drafters=drafter_names())
        jobs = await self._create_jobs(fields, options)
        num_samples = options.params.n
        samples = [SampleOutput(index, index // num_samples) for index in range(len(jobs) * num_samples)]
        builder = ResponseBuilder(str(fields["model"]), llm.tokenizer, is_chat=self.is_chat)
        events = self._generate(request, jobs, samples)
        if options.stream:
            return EventStreamResponse(self._stream(events, samples, builder, options))
        async for _ in events:
            pass
        return json_response(builder.response(samples))

    async def _create_jobs(self, fields: Fields, options: RequestOptions) -> list[GenerationJob]:
        """One job per prompt. Checks first what needs no encoding, which is slow for long texts."""
        llm, max_samples = self._state.llm, self._state.options.max_samples
        max_characters = MAX_CHARACTERS_PER_TOKEN * llm.info.context_length
        prompts = self.parse_prompts(fields, max_characters)
        check_length(options.prediction, max_characters, "prediction")
        num_samples = len(prompts) * options.params.n
        if num_samples > max_samples:
            param = "n" if len(prompts) == 1 else self.prompt_field
            raise ApiError("Too many samples", got=num_samples, allowed=f"at most {max_samples}", param=param)

        def create() -> list[GenerationJob]:
            prediction = llm.predicted_ids(options.prediction)
            jobs = []
            for prompt in prompts:
                prompt_ids = self.encode(prompt, llm.tokenizer)
                llm.engine.check(prompt_ids)
                jobs.append(GenerationJob(prompt_ids, options.params, options.drafter, self.is_chat, prediction))
            return jobs

        try:
            return await asyncio.to_thread(create)
        except DraftwoodError as error:
            raise ApiError.wrap(error, self.prompt_field) from error

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
