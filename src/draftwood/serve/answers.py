"""Answers in OpenAI's words: whole ones, and the chunks of a stream. What drafting brought is told beside the usage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from draftwood.engine import RequestStats, TokenEvent, TokenLogprobs
from draftwood.target.tokenizer import TextCodec

LEAST_LOGPROB = -9999.0  # JSON has no infinity


class Choice:
    """One sample of a prompt as it grows."""

    def __init__(self, index: int, prompt: int) -> None:
        self.index, self.prompt = index, prompt
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stats = RequestStats()

    def add(self, event: TokenEvent) -> None:
        self.texts.append(event.text)
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
            written.append(self._choice(choice.index, content, choice.logprobs, choice.finish_reason))
        return {**self._frame, "object": self._kind, "choices": written, **usage(choices)}

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat's sample: who speaks."""
        return self._chunk([self._choice(index, {"delta": {"role": "assistant", "content": ""}}, (), None)])

    def chunk(self, index: int, event: TokenEvent) -> dict[str, Any]:
        content = {"delta": {"content": event.text} if event.text else {}} if self._is_chat else {"text": event.text}
        return self._chunk([self._choice(index, content, event.logprobs, event.finish_reason)])

    def closing(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The last chunk of a stream, if it was asked for."""
        return {**self._chunk([]), **usage(choices)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._frame, "object": f"{self._kind}.chunk" if self._is_chat else self._kind, "choices": choices}

    def _choice(
        self, index: int, content: dict[str, Any], logprobs: Sequence[TokenLogprobs], finish_reason: str | None
    ) -> dict[str, Any]:
        told = None
        if logprobs:
            told = {"content": [self._entry(each) for each in logprobs]} if self._is_chat else self._columns(logprobs)
        return {"index": index, **content, "logprobs": told, "finish_reason": finish_reason}

    def _entry(self, token: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(*each) for each in token.top]
        return {**self._token(token.token_id, token.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._codec.token_text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8", "replace"))}

    def _columns(self, logprobs: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """As completions have them."""
        name = self._codec.token_text
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset = 0
        for token in logprobs:
            text = name(token.token_id)
            top = {name(token_id): _finite(logprob) for token_id, logprob in token.top}
            for column, value in zip(columns.values(), (text, _finite(token.logprob), top, offset), strict=True):
                column.append(value)
            offset += len(text)
        return columns


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
