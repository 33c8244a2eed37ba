"""Responses in the format of OpenAI's API: whole ones, chunks of event streams, errors.

Statistics of drafting are returned next to the usage, under ``draftwood``.
"""

import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftwood.engine import RequestStats, TokenEvent, TokenLogprobs
from draftwood.serve.errors import ApiError
from draftwood.serve.tools import AnswerDelta, ToolCall, ToolReader
from draftwood.text import TextCodec

MIN_LOGPROB = -9999.0  # JSON has no infinity
DONE_EVENT = b"data: [DONE]\n\n"

Json = dict[str, Any]


def json_response(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode_json(body), status, headers, "application/json")


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    return json_response(error.body(), error.status, {**error.headers, **(headers or {})})


def encode_event(body: Mapping[str, Any]) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + _encode_json(body) + b"\n\n"


def _encode_json(body: Mapping[str, Any]) -> bytes:
    # A client may send half of a surrogate pair, and an error may quote it.
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")


class EventStreamResponse(Response):
    """Server-sent events. Headers are sent with the first event: an error before it can have its own status."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        self.status_code, self.background, self._events = 200, None, events
        self.init_headers({"cache-control": "no-cache", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with aclosing(self._events) as events:
            async for event in events:
                if not started:
                    started = True
                    headers = self.raw_headers
                    await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class SampleOutput:
    """Output of one sample so far. ``prompt`` is the index of its prompt in the request."""

    def __init__(self, index: int, prompt: int, reader: ToolReader | None = None) -> None:
        """``reader``: finds calls of tools in the text."""
        self.index, self.prompt, self._reader = index, prompt, reader
        self.delta = AnswerDelta()  # what the last event added
        self._content = ""
        self._calls: list[ToolCall] = []
        self.texts: list[str] = []  # one per token; empty while a character is incomplete
        self.last_offset = 0  # start of the last event in the text
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stats = RequestStats()
        self._length = 0

    def add(self, event: TokenEvent) -> None:
        self.last_offset = self._length
        self._length += len(event.text)
        self.texts += event.texts
        self.logprobs += event.logprobs
        self.finish_reason = event.finish_reason
        self.stats = event.stats
        self._read_calls(event)

    def message(self) -> Json:
        """The whole answer as a chat message."""
        calls = [call_json(call, with_index=False) for call in self._calls]
        content = {"content": self._content or None, "tool_calls": calls} if calls else {"content": self._content}
        return {"role": "assistant", **content}

    def _read_calls(self, event: TokenEvent) -> None:
        if self._reader is None:
            self.delta = AnswerDelta(event.text)
        else:
            self.delta = self._reader.feed(event.text, is_last=event.finish_reason is not None)
            if self._reader.num_calls and event.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        self._content += self.delta.content
        for call in self.delta.calls:
            if call.name:
                self._calls.append(call)
            else:
                before = self._calls[call.place]
                self._calls[call.place] = before._replace(arguments=before.arguments + call.arguments)


class ResponseBuilder:
    """Builds the JSON objects of one response."""

    def __init__(self, model: str, codec: TextCodec, *, is_chat: bool) -> None:
        self._is_chat, self._codec = is_chat, codec
        self._object = "chat.completion" if is_chat else "text_completion"
        response_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._common = {"id": response_id, "created": int(time.time()), "model": model}

    def response(self, samples: Sequence[SampleOutput]) -> Json:
        choices = []
        for sample in samples:
            content = {"message": sample.message()} if self._is_chat else {"text": "".join(sample.texts)}
            logprobs = self._logprobs(sample.logprobs, sample.texts, 0)
            choices.append(_choice(sample, content, logprobs, sample.finish_reason))
        return {**self._common, "object": self._object, "choices": choices, **usage(samples)}

    def first_chunk(self, sample: SampleOutput) -> Json:
        """The role of a chat message, before its text."""
        return self._chunk([_choice(sample, {"delta": {"role": "assistant", "content": ""}}, None, None)])

    def chunk(self, sample: SampleOutput, event: TokenEvent) -> Json:
        """The last event of a sample."""
        content = {"delta": _delta_json(sample.delta)} if self._is_chat else {"text": event.text}
        logprobs = self._logprobs(event.logprobs, event.texts, sample.last_offset)
        return self._chunk([_choice(sample, content, logprobs, sample.finish_reason)])

    def usage_chunk(self, samples: Sequence[SampleOutput]) -> Json:
        return {**self._chunk([]), **usage(samples)}

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
        raw = self._codec.token_bytes(token_id)
        return {"token": self._token_text(token_id), "logprob": _finite(logprob), "bytes": list(raw)}

    def _token_text(self, token_id: int) -> str:
        return self._codec.token_bytes(token_id).decode("utf-8", "replace")


def call_json(call: ToolCall, *, with_index: bool) -> Json:
    """A call, or a part of it."""
    index = {"index": call.place} if with_index else {}
    if not call.name:
        return {**index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {**index, "id": call.call_id, "type": "function", "function": function}


def _delta_json(delta: AnswerDelta) -> Json:
    content: Json = {"content": delta.content} if delta.content else {}
    calls = [call_json(call, with_index=True) for call in delta.calls]
    return {**content, "tool_calls": calls} if calls else content


def usage(samples: Sequence[SampleOutput]) -> Json:
    """Token counts and drafting statistics of a response. Samples of one prompt count its tokens once."""
    stats = [sample.stats for sample in samples]
    by_prompt = {sample.prompt: sample.stats for sample in reversed(samples)}.values()  # of the first sample
    num_prompt = sum(each.prompt_tokens for each in by_prompt)
    num_output = sum(each.output_tokens for each in stats)
    num_passes = sum(each.cycles for each in stats)
    num_positions = sum(each.drafted_nodes for each in stats) + num_passes
    return {
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(each.reused_tokens for each in by_prompt)},
        },
        "draftwood": {
            "passes": num_passes,
            "tokens_per_pass": round(num_output / num_passes, 4) if num_passes else 0.0,
            "positions_per_pass": round(num_positions / max(num_passes, 1), 4),
            "tokens_per_second": round(max((each.tokens_per_second for each in stats), default=0.0), 2),
        },
    }


def summarize(samples: Sequence[SampleOutput]) -> Json:
    """What the request log says about a response."""
    counts, drafting = usage(samples).values()
    return {
        "samples": len(samples),
        "prompt_tokens": counts["prompt_tokens"],
        "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
        "output_tokens": counts["completion_tokens"],
        "passes": drafting["passes"],
    }


def _choice(sample: SampleOutput, content: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": sample.index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else MIN_LOGPROB
