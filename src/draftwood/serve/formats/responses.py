"""OpenAI's responses: an object with output items, and a stream of named events.

Its output is one message. Tools would add items to ``whole`` and events to ``add``.
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from draftwood.engine import TokenEvent
from draftwood.serve.errors import ApiError
from draftwood.serve.formats.base import Json, NamedEventFormat, Order, SampleOutput
from draftwood.serve.formats.usage import Counts, drafting, timings
from draftwood.text import TextCodec


class ResponsesFormat(NamedEventFormat):
    def __init__(self, order: Order, codec: TextCodec) -> None:
        super().__init__(order, codec)
        self._id, self._item_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._created, self._number = time.time(), 0

    def whole(self, samples: Sequence[SampleOutput]) -> Json:
        (sample,) = samples
        is_cut = sample.finish_reason == "length"
        return {
            **self._response("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(sample.text, "incomplete" if is_cut else "completed")],
            "usage": self._usage(samples),
            "timings": timings(samples),
            "draftwood": drafting(samples),
        }

    def begin(self, sample: SampleOutput) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        item = {**self._item("", "in_progress"), "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._part_event("response.content_part.added", part=_part(""))

    def add(self, sample: SampleOutput, event: TokenEvent, samples: Sequence[SampleOutput]) -> Iterator[bytes]:
        if event.text:
            yield self._part_event("response.output_text.delta", delta=event.text, logprobs=[])

    def end(self, samples: Sequence[SampleOutput]) -> Iterator[bytes]:
        whole = self.whole(samples)
        (item,) = whole["output"]
        (part,) = item["content"]
        yield self._part_event("response.output_text.done", text=part["text"], logprobs=[])
        yield self._part_event("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{whole['status']}", response=whole)

    def fail(self, error: ApiError) -> Iterator[bytes]:
        known = error.body()["error"]
        problem = {"code": known["code"], "message": known["message"]}
        yield self._event("error", **problem, param=known["param"])
        failure = {"code": "server_error", "message": known["message"]}
        yield self._event("response.failed", response={**self._response("failed"), "error": failure})

    def _event(self, kind: str, **body: Any) -> bytes:
        self._number += 1
        return self.encode({"type": kind, "sequence_number": self._number - 1, **body})

    def _part_event(self, kind: str, **body: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **body)

    def _item(self, text: str, status: str) -> Json:
        return {"type": "message", "id": self._item_id, "status": status, "role": "assistant", "content": [_part(text)]}

    def _response(self, status: str) -> Json:
        """The response without its output."""
        fields, params = self.order.fields, self.order.options.params
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": fields.get("instructions"),
            "max_output_tokens": fields.get("max_output_tokens"),
            "metadata": fields.get("metadata") or {},
            "model": self.order.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": fields.get("user"),
        }

    def _usage(self, samples: Sequence[SampleOutput]) -> Json:
        counts = Counts.of(samples)
        return {
            "input_tokens": counts.prompt,
            "input_tokens_details": {"cached_tokens": counts.cached},
            "output_tokens": counts.output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts.prompt + counts.output,
        }


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
