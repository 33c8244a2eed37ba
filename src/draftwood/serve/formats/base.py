"""What every format does: whole responses, and event streams in parts."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from draftwood.engine import RequestStats, TokenEvent, TokenLogprobs
from draftwood.serve.errors import ApiError
from draftwood.serve.requests import Fields, RequestOptions
from draftwood.serve.responses import encode_event
from draftwood.serve.runner import GenerationJob
from draftwood.text import TextCodec

Json = dict[str, Any]


class Order(NamedTuple):
    """A parsed request."""

    model: str
    fields: Fields  # as they were sent
    options: RequestOptions
    jobs: list[GenerationJob]  # one per prompt

    def new_samples(self) -> list["SampleOutput"]:
        return [
            SampleOutput(index, job) for index, job in enumerate(job for job in self.jobs for _ in range(job.params.n))
        ]


class SampleOutput:
    """Output of one sample so far."""

    def __init__(self, index: int, job: GenerationJob) -> None:
        self.index, self.job = index, job
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
