"""Anthropic's messages: content blocks, and a stream of named events."""

import uuid
from collections.abc import Iterator, Sequence

from draftwood.engine import TokenEvent
from draftwood.serve.errors import ApiError
from draftwood.serve.formats.base import Json, NamedEventFormat, Order, SampleOutput
from draftwood.serve.formats.usage import Counts, drafting, timings
from draftwood.text import TextCodec


class MessageFormat(NamedEventFormat):
    def __init__(self, order: Order, codec: TextCodec) -> None:
        super().__init__(order, codec)
        self._common: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": order.model,
        }

    def whole(self, samples: Sequence[SampleOutput]) -> Json:
        (sample,) = samples
        content = [{"type": "text", "text": sample.text}]
        counts = {"usage": _usage(samples), "timings": timings(samples), "draftwood": drafting(samples)}
        return {**self._common, "content": content, **self._stop(sample), **counts}

    def begin(self, sample: SampleOutput) -> Iterator[bytes]:
        stop = {"stop_reason": None, "stop_sequence": None}
        usage = {**_usage([sample]), "output_tokens": 0}
        yield self.encode({"type": "message_start", "message": {**self._common, "content": [], **stop, "usage": usage}})
        block = {"type": "text", "text": ""}
        yield self.encode({"type": "content_block_start", "index": 0, "content_block": block})

    def add(self, sample: SampleOutput, event: TokenEvent, samples: Sequence[SampleOutput]) -> Iterator[bytes]:
        if event.text:
            delta = {"type": "text_delta", "text": event.text}
            yield self.encode({"type": "content_block_delta", "index": 0, "delta": delta})

    def end(self, samples: Sequence[SampleOutput]) -> Iterator[bytes]:
        (sample,) = samples
        yield self.encode({"type": "content_block_stop", "index": 0})
        counts = {"usage": _usage(samples), "timings": timings(samples), "draftwood": drafting(samples)}
        yield self.encode({"type": "message_delta", "delta": self._stop(sample), **counts})
        yield self.encode({"type": "message_stop"})

    def fail(self, error: ApiError) -> Iterator[bytes]:
        yield self.encode(error.message_body())

    def _stop(self, sample: SampleOutput) -> Json:
        """Why the message ended, and the stop sequence if it was one."""
        if sample.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        text = sample.text
        rest = self.codec.decode(sample.token_ids)[len(text) :] if sample.job.params.stop else ""
        found = next((stop for stop in sample.job.params.stop if rest.startswith(stop)), None)
        return {"stop_reason": "end_turn" if found is None else "stop_sequence", "stop_sequence": found}


def _usage(samples: Sequence[SampleOutput]) -> Json:
    counts = Counts.of(samples)
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.output,
    }
