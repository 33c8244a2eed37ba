"""Anthropic's messages: content blocks, and a stream of named events."""

import json
import uuid
from collections.abc import Iterator, Sequence

from draftwood.engine import TokenEvent
from draftwood.serve.errors import ApiError
from draftwood.serve.formats.base import Json, NamedEventFormat, Order, SampleOutput
from draftwood.serve.formats.usage import Counts, drafting, timings
from draftwood.serve.tools import ToolCall
from draftwood.text import TextCodec

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageFormat(NamedEventFormat):
    def __init__(self, order: Order, codec: TextCodec) -> None:
        super().__init__(order, codec)
        self._common: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": order.model,
        }
        self._num_blocks = 0
        self._open = ""  # type of the block that is being streamed

    def whole(self, samples: Sequence[SampleOutput]) -> Json:
        (sample,) = samples
        text = [{"type": "text", "text": sample.content}] if sample.content or not sample.calls else []
        calls = [_tool_use(call, _read_arguments(call.arguments)) for call in sample.calls]
        return {**self._common, "content": [*text, *calls], **self._stop(sample), **_counts(samples)}

    def begin(self, sample: SampleOutput) -> Iterator[bytes]:
        stop = {"stop_reason": None, "stop_sequence": None}
        usage = {**_usage([sample]), "output_tokens": 0}
        yield self.encode({"type": "message_start", "message": {**self._common, "content": [], **stop, "usage": usage}})

    def add(self, sample: SampleOutput, event: TokenEvent, samples: Sequence[SampleOutput]) -> Iterator[bytes]:
        if sample.delta.content:
            if self._open != "text":
                yield from self._open_block({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": sample.delta.content})
        for call in sample.delta.calls:
            if call.name:
                yield from self._open_block(_tool_use(call, {}))
            if call.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def end(self, samples: Sequence[SampleOutput]) -> Iterator[bytes]:
        if not self._num_blocks:
            yield from self._open_block({"type": "text", "text": ""})
        yield from self._close_block()
        yield self.encode({"type": "message_delta", "delta": self._stop(samples[0]), **_counts(samples)})
        yield self.encode({"type": "message_stop"})

    def fail(self, error: ApiError) -> Iterator[bytes]:
        yield self.encode(error.message_body())

    def _open_block(self, block: Json) -> Iterator[bytes]:
        yield from self._close_block()
        self._open = block["type"]
        self._num_blocks += 1
        yield self.encode({"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block})

    def _close_block(self) -> Iterator[bytes]:
        if self._open:
            self._open = ""
            yield self.encode({"type": "content_block_stop", "index": self._num_blocks - 1})

    def _delta(self, delta: Json) -> bytes:
        return self.encode({"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta})

    def _stop(self, sample: SampleOutput) -> Json:
        """Why the message ended, and the stop sequence if it was one."""
        reason, stops = STOP_REASONS.get(sample.finish_reason or ""), sample.job.params.stop
        if reason is None and stops:
            rest = self.codec.decode(sample.token_ids)[len(sample.text) :]
            found = next((stop for stop in stops if rest.startswith(stop)), None)
            if found is not None:
                return {"stop_reason": "stop_sequence", "stop_sequence": found}
        return {"stop_reason": reason or "end_turn", "stop_sequence": None}


def _tool_use(call: ToolCall, arguments: Json) -> Json:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": arguments}


def _read_arguments(text: str) -> Json:
    """The arguments of a call; empty if the answer ended within them."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _counts(samples: Sequence[SampleOutput]) -> Json:
    return {"usage": _usage(samples), "timings": timings(samples), "draftwood": drafting(samples)}


def _usage(samples: Sequence[SampleOutput]) -> Json:
    counts = Counts.of(samples)
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.output,
    }
