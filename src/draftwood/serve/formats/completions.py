"""OpenAI's chats and completions: whole responses and chunks of event streams.

Statistics of drafting are returned next to the usage, under ``draftwood``.
"""

import math
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from draftwood.engine import TokenEvent, TokenLogprobs
from draftwood.serve.errors import ApiError
from draftwood.serve.formats.base import Json, Order, ResponseFormat, SampleOutput, is_last
from draftwood.serve.formats.cycles import CycleReader
from draftwood.serve.formats.usage import drafting, timings, usage
from draftwood.serve.responses import encode_event, encode_json
from draftwood.serve.tools import AnswerDelta, ToolCall
from draftwood.text import TextCodec

MIN_LOGPROB = -9999.0  # JSON has no infinity
MARK = uuid.uuid4().hex  # in place of a text
DONE_EVENT = b"data: [DONE]\n\n"


class CompletionFormat(ResponseFormat):
    def __init__(self, order: Order, codec: TextCodec, *, is_chat: bool) -> None:
        super().__init__(order, codec)
        self._is_chat = is_chat
        self._object = "chat.completion" if is_chat else "text_completion"
        response_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._common = {"id": response_id, "created": int(time.time()), "model": order.model}
        self._frames: dict[int, list[bytes]] = {}  # by sample: the chunk around a text
        self._cycles: defaultdict[int, CycleReader] = defaultdict(lambda: CycleReader(codec))  # by sample

    def whole(self, samples: Sequence[SampleOutput]) -> Json:
        choices = []
        for sample in samples:
            content = {"message": _message(sample)} if self._is_chat else {"text": self._echo(sample) + sample.text}
            logprobs = self._logprobs(sample.logprobs, sample.texts, 0)
            choices.append(_choice(sample, content, logprobs, sample.finish_reason))
        return {**self._common, "object": self._object, "choices": choices, **_counts(samples)}

    def begin(self, sample: SampleOutput) -> Iterator[bytes]:
        """The role of a chat message before its text, or the prompt."""
        if self._is_chat:
            content: Json = {"delta": {"role": "assistant", "content": ""}}
            yield encode_event(self._chunk([_choice(sample, content, None, None)]))
        elif text := self._echo(sample):
            yield encode_event(self._chunk([_choice(sample, {"text": text}, None, None)]))

    def add(self, sample: SampleOutput, event: TokenEvent, samples: Sequence[SampleOutput]) -> Iterator[bytes]:
        delta = sample.delta
        has_text_only = bool(delta.content) and not delta.calls and not delta.thoughts
        if self._is_plain and has_text_only and sample.finish_reason is None:
            yield self._frame(sample, delta.content)
            return
        content = {"delta": _delta(sample.delta)} if self._is_chat else {"text": event.text}
        logprobs = self._logprobs(event.logprobs, event.texts, sample.last_offset)
        chunk = self._chunk([_choice(sample, content, logprobs, sample.finish_reason)])
        if self.order.options.include_cycles:
            chunk["draftwood"] = {"cycle": self._cycles[sample.index].describe(event)}
        if not self.order.options.include_usage and is_last(samples):
            chunk["timings"] = timings(samples)
        yield encode_event(chunk)

    @property
    def _is_plain(self) -> bool:
        """Whether the chunks of a stream have nothing but text."""
        options = self.order.options
        return options.params.logprobs is None and not options.include_cycles

    def _frame(self, sample: SampleOutput, text: str) -> bytes:
        """A chunk with a text, as most are: only the text is encoded each time."""
        frame = self._frames.get(sample.index)
        if frame is None:
            content = {"delta": {"content": MARK}} if self._is_chat else {"text": MARK}
            chunk = encode_event(self._chunk([_choice(sample, content, None, None)]))
            frame = self._frames[sample.index] = chunk.split(encode_json(MARK))
        return frame[0] + encode_json(text) + frame[1]

    def end(self, samples: Sequence[SampleOutput]) -> Iterator[bytes]:
        if self.order.options.include_usage:
            yield encode_event({**self._chunk([]), **_counts(samples)})
        yield DONE_EVENT

    def fail(self, error: ApiError) -> Iterator[bytes]:
        yield encode_event(error.body())
        yield DONE_EVENT

    def _echo(self, sample: SampleOutput) -> str:
        """The prompt, if the response repeats it."""
        return self.codec.decode(sample.job.prompt_ids) if self.order.options.echo else ""

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._common, "object": self._object + (".chunk" if self._is_chat else ""), "choices": choices}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs], texts: Sequence[str], offset: int) -> Json | None:
        """None if the request has no logprobs. ``offset``: start of these tokens in the text."""
        if not logprobs:
            return None
        if self._is_chat:
            return {"content": [self._chat_logprobs(token) for token in logprobs]}
        return {
            "tokens": [self._token_text(token.token_id) for token in logprobs],
            "token_logprobs": [_finite(token.logprob) for token in logprobs],
            "top_logprobs": [{self._token_text(other): _finite(p) for other, p in token.top} for token in logprobs],
            "text_offset": list(accumulate(map(len, texts), initial=offset))[: len(logprobs)],
        }

    def _chat_logprobs(self, token: TokenLogprobs) -> Json:
        top = [self._chat_token(*each) for each in token.top]
        return {**self._chat_token(token.token_id, token.logprob), "top_logprobs": top}

    def _chat_token(self, token_id: int, logprob: float) -> Json:
        raw = self.codec.token_bytes(token_id)
        return {"token": self._token_text(token_id), "logprob": _finite(logprob), "bytes": list(raw)}

    def _token_text(self, token_id: int) -> str:
        return self.codec.token_bytes(token_id).decode("utf-8", "replace")


def _message(sample: SampleOutput) -> Json:
    message: Json = {"role": "assistant", "content": sample.content}
    if sample.thoughts:
        message["reasoning_content"] = sample.thoughts
    if sample.calls:
        message |= {"content": sample.content or None, "tool_calls": [_call(call) for call in sample.calls]}
    return message


def _delta(delta: AnswerDelta) -> Json:
    content: Json = {"reasoning_content": delta.thoughts} if delta.thoughts else {}
    if delta.content:
        content["content"] = delta.content
    calls = [{"index": call.place, **_call(call)} for call in delta.calls]
    return {**content, "tool_calls": calls} if calls else content


def _call(call: ToolCall) -> Json:
    """A call, or a part of it."""
    if not call.name:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _counts(samples: Sequence[SampleOutput]) -> Json:
    return {"usage": usage(samples), "timings": timings(samples), "draftwood": drafting(samples)}


def _choice(sample: SampleOutput, content: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": sample.index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else MIN_LOGPROB
