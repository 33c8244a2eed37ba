"""Answers in OpenAI's words: whole ones, and the chunks of a stream. What drafting brought is told beside the usage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from draftwood.engine import RequestStats, TokenEvent, TokenLogprobs
from draftwood.text import TextCodec

LEAST_LOGPROB = -9999.0  # JSON has no infinity


class Choice:
    """One sample of a prompt as it grows."""

    def __init__(self, index: int, prompt: int) -> None:
        self.index, self.prompt = index, prompt
        self.texts: list[str] = []  # that each token made certain
        self.latest = 0  # where in the text the latest event begins
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stats = RequestStats()
        self._length = 0

    def add(self, event: TokenEvent) -> None:
        self.latest = self._length
        self._length += len(event.text)
        self.texts += event.texts
        self.logprobs += event.logprobs
        self.finish_reason = event.finish_reason
        self.stats = event.stats


class Writer:
    """Words of one answer: ``kind`` is ``chat.completion`` or ``text_completion``."""

    def __init__(self, kind: str, answer_id: str, created: int, model: str, codec: TextCodec) -> None:
        self._is_chat = kind == "chat.completion"
        self._frame = {"id": answer_id, "created": created, "model": model}
        self._kind = kind
        self._codec = codec

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        written = []
        for choice in choices:
            text = "".join(choice.texts)
            content = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
            told = self._logprobs(choice.logprobs, choice.texts, 0)
            written.append(_choice(choice.index, content, told, choice.finish_reason))
        return {**self._frame, "object": self._kind, "choices": written, **usage(choices)}

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat's sample: who speaks."""
        return self._chunk([_choice(index, {"delta": {"role": "assistant", "content": ""}}, None, None)])

    def chunk(self, choice: Choice, event: TokenEvent) -> dict[str, Any]:
        """Of the latest event of a sample."""
        content = {"delta": {"content": event.text} if event.text else {}} if self._is_chat else {"text": event.text}
        told = self._logprobs(event.logprobs, event.texts, choice.latest)
        return self._chunk([_choice(choice.index, content, told, event.finish_reason)])

    def closing(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The last chunk of a stream, if it was asked for."""
        return {**self._chunk([]), **usage(choices)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._frame, "object": f"{self._kind}.chunk" if self._is_chat else self._kind, "choices": choices}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs], texts: Sequence[str], offset: int) -> dict[str, Any] | None:
        """None where nobody asked for them. ``offset``: where in the answer these tokens begin."""
        if not logprobs:
            return None
        return (
            {"content": [self._entry(each) for each in logprobs]}
            if self._is_chat
            else self._columns(logprobs, texts, offset)
        )

    def _entry(self, token: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(*each) for each in token.top]
        return {**self._token(token.token_id, token.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._codec.token_bytes(token_id)
        return {"token": _readable(raw), "logprob": _finite(logprob), "bytes": list(raw)}

    def _columns(self, logprobs: Iterable[TokenLogprobs], texts: Sequence[str], offset: int) -> dict[str, Any]:
        """As completions have them."""
        ends = list(accumulate(map(len, texts), initial=offset))
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, start in zip(logprobs, ends, strict=False):
            top = {self._name(token_id): _finite(logprob) for token_id, logprob in token.top}
            told = (self._name(token.token_id), _finite(token.logprob), top, start)
            for column, value in zip(columns.values(), told, strict=True):
                column.append(value)
        return columns

    def _name(self, token_id: int) -> str:
        return _readable(self._codec.token_bytes(token_id))


def _choice(
    index: int, content: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of a whole answer, a prompt once for all samples of it, and what drafting brought."""
    stats = [choice.stats for choice in choices]
    first = {choice.prompt: choice.stats for choice in reversed(choices)}.values()  # the others share its prompt
    prompt = sum(each.prompt_tokens for each in first)
    output, cycles = (sum(getattr(each, name) for each in stats) for name in ("output_tokens", "cycles"))
    return {
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(each.reused_tokens for each in first)},
        },
        "draftwood": {
            "passes": cycles,
            "tokens_per_pass": round(output / cycles, 4) if cycles else 0.0,
            "positions_per_pass": round((sum(each.drafted_nodes for each in stats) + cycles) / max(cycles, 1), 4),
            "tokens_per_second": round(max((each.tokens_per_second for each in stats), default=0.0), 2),
        },
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def _readable(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
