"""From accepted tokens to output: one by one, exactly as plain decoding would, until one ends it."""

from collections.abc import Sequence
from typing import NamedTuple

from draftwood.config import SamplingParams
from draftwood.engine.stopping import StopStrings, StopTokens
from draftwood.text import IncrementalDecoder, TextCodec

NO_TEXT = ("", False)
COMPLETE = "complete"  # reason of a token that ends the output and is shown


class Block(NamedTuple):
    """The accepted tokens of one cycle up to a stop condition."""

    token_ids: list[int]
    texts: tuple[str, ...]  # the text that each token made certain
    finish_reason: str | None


class OutputWriter:
    """Applies the stop conditions of one sample and decodes its text."""

    def __init__(
        self,
        params: SamplingParams,
        codec: TextCodec,
        eos_token_ids: Sequence[int],
        *,
        max_tokens: int,
        with_text: bool,
    ) -> None:
        self._decodes = with_text or bool(params.stop)
        self._num_output = 0
        self._stop_tokens = StopTokens(params, eos_token_ids, max_tokens)
        self._stop_strings = StopStrings(params.stop)
        self._decoder = IncrementalDecoder(codec)

    def write(self, candidates: list[int], *, is_complete: bool = False) -> Block:
        """``is_complete``: the output ends with the last candidate, which is a part of it."""
        texts: tuple[str, ...] = ()
        for token_id in candidates:
            self._num_output += 1
            reason = self._stop_tokens.reason(token_id, self._num_output)
            if is_complete and reason != "stop" and len(texts) == len(candidates) - 1:
                reason = COMPLETE
            text, stopped = self._decode(token_id, reason) if self._decodes else NO_TEXT
            texts += (text,)
            if stopped or reason is not None:
                reason = "length" if reason == "length" and not stopped else "stop"
                return Block(candidates[: len(texts)], texts, reason)
        return Block(candidates, texts, None)

    def _decode(self, token_id: int, reason: str | None) -> tuple[str, bool]:
        """The text that the token makes certain, up to a stop string, and whether there was one."""
        text = "" if reason == "stop" else self._decoder.push(token_id)
        shown, stopped = self._stop_strings.feed(text)
        if reason is not None and not stopped:
            rest, stopped = self._stop_strings.feed(self._decoder.flush())
            shown += rest if stopped else rest + self._stop_strings.flush()
        return shown, stopped
