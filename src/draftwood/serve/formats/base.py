"""What every format does: whole responses, and event streams in parts."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from draftwood.engine import RequestStats, TokenEvent, TokenLogprobs
from draftwood.serve.errors import ApiError
from draftwood.serve.requests import Fields, RequestOptions
from draftwood.serve.responses import encode_event
from draftwood.serve.runner import GenerationJob
from draftwood.serve.tools import AnswerDelta, ToolCall, ToolReader
from draftwood.text import TextCodec

Json = dict[str, Any]


class Order(NamedTuple):
    """A parsed request."""

    model: str
    fields: Fields  # as they were sent
    options: RequestOptions
    jobs: list[GenerationJob]  # one per prompt

    def new_samples(self) -> list["SampleOutput"]:
        jobs = [job for job in self.jobs for _ in range(job.params.n)]
        return [SampleOutput(index, job, self._new_reader()) for index, job in enumerate(jobs)]

    def _new_reader(self) -> ToolReader | None:
        tools = self.options.tools
        return None if tools is None else ToolReader(tools.form, parallel=tools.parallel, marks=tools.marks)


class SampleOutput:
    """Output of one sample so far."""

    def __init__(self, index: int, job: GenerationJob, reader: ToolReader | None = None) -> None:
        """``reader``: finds calls of tools in the text."""
        self.index, self.job, self._reader = index, job, reader
        self.delta = AnswerDelta()  # what the last event added
        self.content = ""  # the text without calls
        self.calls: list[ToolCall] = []
        self.token_ids: list[int] = []
        self.texts: list[str] = []  # one per token; empty while a character is incomplete
        self.last_offset = 0  # start of the last event in the text
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stats = RequestStats()
        self._length = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, event: TokenEvent) -> None:
        self.last_offset = self._length
        self._length += len(event.text)
        self.token_ids += event.token_ids
        self.texts += event.texts
        self.logprobs += event.logprobs
        self.finish_reason = event.finish_reason
        self.stats = event.stats
        self.delta = AnswerDelta(event.text)
        if self._reader is not None:
            text = self._reader.spell(event.token_ids, event.texts)
            self.delta = self._reader.feed(text, is_last=event.finish_reason is not None)
            if self._reader.num_calls and event.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        self.content += self.delta.content
        for call in self.delta.calls:
            self.calls[call.place :] = [call if call.name else self.calls[call.place].extend(call.arguments)]


class ResponseFormat(ABC):
    """Builds the response to one request."""

    def __init__(self, order: Order, codec: TextCodec) -> None:
        self.order, self.codec = order, codec

    @abstractmethod
    def whole(self, samples: Sequence[SampleOutput]) -> Json:
        """The response without a stream. Runs outside the event loop."""

    @abstractmethod
    def begin(self, sample: SampleOutput) -> Iterator[bytes]:
        """The events before the first one of a sample."""

    @abstractmethod
    def add(self, sample: SampleOutput, event: TokenEvent, samples: Sequence[SampleOutput]) -> Iterator[bytes]:
        """The events for the tokens that a sample, one of ``samples``, has just got."""

    @abstractmethod
    def end(self, samples: Sequence[SampleOutput]) -> Iterator[bytes]:
        """The events after the last sample has ended."""

    @abstractmethod
    def fail(self, error: ApiError) -> Iterator[bytes]:
        """The last events of a stream that fails after it has begun."""


class NamedEventFormat(ResponseFormat):
    """A format whose events have names: one sample, and every event is an object with its ``type``."""

    def encode(self, body: Mapping[str, Any]) -> bytes:
        return f"event: {body['type']}\n".encode() + encode_event(body)


def is_last(samples: Sequence[SampleOutput]) -> bool:
    return all(sample.finish_reason is not None for sample in samples)
