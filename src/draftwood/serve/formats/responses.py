"""OpenAI's responses: an object with output items, and a stream of named events."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from draftwood.engine import TokenEvent
from draftwood.serve.errors import ApiError
from draftwood.serve.formats.base import Json, NamedEventFormat, Order, SampleOutput
from draftwood.serve.formats.usage import Counts, drafting, timings
from draftwood.serve.tools import ToolCall
from draftwood.text import TextCodec


class ResponsesFormat(NamedEventFormat):
    def __init__(self, order: Order, codec: TextCodec) -> None:
        super().__init__(order, codec)
        self._id, self._message_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._created, self._number = time.time(), 0
        self._open: Json | None = None  # the item that is being streamed
        self._done: list[Json] = []  # items before it

    def whole(self, samples: Sequence[SampleOutput]) -> Json:
        (sample,) = samples
        status = _status(sample)
        message = [self._message(sample.content, status)] if sample.content or not sample.calls else []
        return self._finish([*message, *[_call_item(call, status) for call in sample.calls]], samples)

    def begin(self, sample: SampleOutput) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def add(self, sample: SampleOutput, event: TokenEvent, samples: Sequence[SampleOutput]) -> Iterator[bytes]:
        if sample.delta.content:
            yield from self._add_text(sample.delta.content)
        for call in sample.delta.calls:
            if call.name:
                yield from self._close_item("completed")
                yield from self._open_item(_call_item(call._replace(arguments=""), "in_progress"))
            if call.arguments and self._open is not None:
                self._open["arguments"] += call.arguments
                yield self._item_event("response.function_call_arguments.delta", delta=call.arguments)

    def end(self, samples: Sequence[SampleOutput]) -> Iterator[bytes]:
        (sample,) = samples
        if self._open is None and not self._done:
            yield from self._add_text("")
        yield from self._close_item(_status(sample))
        whole = self._finish(self._done, samples)
        yield self._event(f"response.{whole['status']}", response=whole)

    def fail(self, error: ApiError) -> Iterator[bytes]:
        known = error.body()["error"]
        yield self._event("error", code=known["code"], message=known["message"], param=known["param"])
        failure = {"code": "server_error", "message": known["message"]}
        yield self._event("response.failed", response={**self._response("failed"), "error": failure})

    def _add_text(self, text: str) -> Iterator[bytes]:
        if self._open is None or self._open["type"] != "message":
            yield from self._close_item("completed")
            yield from self._open_item({**self._message("", "in_progress"), "content": []})
            yield self._item_event("response.content_part.added", content_index=0, part=_part(""))
        assert self._open is not None
        self._open["text"] = self._open.get("text", "") + text
        if text:
            yield self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _open_item(self, item: Json) -> Iterator[bytes]:
        self._open = dict(item)
        yield self._event("response.output_item.added", output_index=len(self._done), item=item)

    def _close_item(self, status: str) -> Iterator[bytes]:
        if self._open is None:
            return
        item = {**self._open, "status": status}
        if item["type"] == "message":
            part = _part(item.pop("text"))
            item["content"] = [part]
            yield self._item_event("response.output_text.done", content_index=0, text=part["text"], logprobs=[])
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            known = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **known)
        yield self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._open = None

    def _event(self, kind: str, **body: Any) -> bytes:
        self._number += 1
        return self.encode({"type": kind, "sequence_number": self._number - 1, **body})

    def _item_event(self, kind: str, **body: Any) -> bytes:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self._done), **body)

    def _message(self, text: str, status: str) -> Json:
        known = {"type": "message", "id": self._message_id, "status": status, "role": "assistant"}
        return {**known, "content": [_part(text)]}

    def _finish(self, items: Sequence[Json], samples: Sequence[SampleOutput]) -> Json:
        status = _status(samples[0])
        return {
            **self._response(status),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(items),
            "usage": _usage(samples),
            "timings": timings(samples),
            "draftwood": drafting(samples),
        }

    def _response(self, status: str) -> Json:
        """The response without its output."""
        fields, options = self.order.fields, self.order.options
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
            "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": options.params.temperature,
            "text": fields.get("text") or {"format": {"type": "text"}},
            "tool_choice": fields.get("tool_choice") or "auto",
            "tools": fields.get("tools") or [],
            "top_logprobs": 0,
            "top_p": options.params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": fields.get("user"),
        }


def _status(sample: SampleOutput) -> str:
    return "incomplete" if sample.finish_reason == "length" else "completed"


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: ToolCall, status: str) -> Json:
    item = {"type": "function_call", "id": f"fc_{call.call_id}", "call_id": call.call_id, "status": status}
    return {**item, "name": call.name, "arguments": call.arguments}


def _usage(samples: Sequence[SampleOutput]) -> Json:
    counts = Counts.of(samples)
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached},
        "output_tokens": counts.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt + counts.output,
    }
