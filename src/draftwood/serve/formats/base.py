"""What every format does: whole responses, and event streams in parts."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from draftwood.engine import RequestStats, TokenEvent, TokenLogprobs
from draftwood.serve.errors import ApiError
from draftwood.serve.requests import Fields, RequestOptions
from draftwood.serve.responses import encode_event
from draftwood.serve.runner import GenerationJob
from draftwood.serve.thoughts import ThoughtReader
from draftwood.serve.tools import AnswerDelta, ToolCall, ToolReader
from draftwood.text import TextCodec

Json = dict[str, Any]
NO_MARKS: Mapping[int, str] = {}


class AnswerReaders(NamedTuple):
    """What finds the parts of an answer in its text; None: it has no such parts."""

    thoughts: ThoughtReader | None = None
    calls: ToolReader | None = None

    def read(self, text: str, *, is_last: bool) -> AnswerDelta:
        thoughts = ""
        if self.thoughts is not None:
            thoughts, text = self.thoughts.feed(text, is_last=is_last)
        delta = AnswerDelta(text) if self.calls is None else self.calls.feed(text, is_last=is_last)
        delta.thoughts = thoughts
        return delta


class Order(NamedTuple):
    """A parsed request."""

    model: str
    fields: Fields  # as they were sent
    options: RequestOptions
    jobs: list[GenerationJob]  # one per prompt

    def new_samples(self) -> list["SampleOutput"]:
        jobs = [job for job in self.jobs for _ in range(job.params.n)]
        return [SampleOutput(index, job, *self._new_readers()) for index, job in enumerate(jobs)]

    def _new_readers(self) -> tuple[AnswerReaders, dict[int, str]]:
        tools, thinking = self.options.tools, self.options.thinking
        thoughts = ThoughtReader(thinking) if thinking != "no" else None
        marks = {**self.options.marks, **(tools.marks if tools is not None else {})}
        reader = None if tools is None else ToolReader(tools.form, parallel=tools.parallel)
        return AnswerReaders(thoughts, reader), {token: text for text, token in marks.items()}


class SampleOutput:
    """Output of one sample so far."""

    def __init__(
        self,
        index: int,
        job: GenerationJob,
        readers: AnswerReaders = AnswerReaders(),  # noqa: B008 - immutable
        marks: Mapping[int, str] = NO_MARKS,
    ) -> None:
        """``marks``: texts of special tokens, which decoding skips."""
        self.index, self.job, self._readers, self._marks = index, job, readers, marks
        self.delta = AnswerDelta()  # what the last event added
        self.content = ""  # the text without thoughts and calls
        self.thoughts = ""
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
        text = event.text
        if self._marks:
            spelled = zip(event.token_ids, event.texts, strict=True)
            text = "".join(text + self._marks.get(token, "") for token, text in spelled)
        self.delta = self._readers.read(text, is_last=event.finish_reason is not None)
        self.content += self.delta.content
        self.thoughts += self.delta.thoughts
        for call in self.delta.calls:
            self.calls[call.place :] = [call if call.name else self.calls[call.place].extend(call.arguments)]
        if self.calls and event.finish_reason == "stop":
            self.finish_reason = "tool_calls"


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
