"""From accepted tokens to output: one by one, exactly as plain decoding would, until one ends it."""

from collections.abc import Sequence
from typing import NamedTuple

from draftwood.config import SamplingParams
from draftwood.engine.stopping import StopStrings, StopTokens
from draftwood.text import IncrementalDecoder, TextCodec


class Block(NamedTuple):
    """The accepted tokens of one cycle up to a stop condition."""

    token_ids: list[int]
    finish_reason: str | None
    hides_last: bool = False  # the last token ends the output and is not a part of its text
    texts: tuple[str, ...] | None = None  # the text that each token made certain; None: not decoded yet


class OutputWriter:
    """Applies the stop conditions of one sample and decodes its text.

    Text is decoded at once only where a stop string may end the output; otherwise ``decode`` may be called later.
    """

    def __init__(
        self,
        params: SamplingParams,
        codec: TextCodec,
        eos_token_ids: Sequence[int],
        *,
        max_tokens: int,
        with_text: bool,
    ) -> None:
        self._with_text = with_text
        self._num_output = 0
        self._stop_tokens = StopTokens(params, eos_token_ids, max_tokens)
        self._stop_strings = StopStrings(params.stop) if params.stop else None
        self._decoder = IncrementalDecoder(codec)

    def write(self, candidates: list[int], *, is_complete: bool = False) -> Block:
        """``is_complete``: the output ends with the last candidate, which is a part of it."""
        count, reason = self._stop_tokens.first(candidates, self._num_output)
        hides_last = reason == "stop"
        if is_complete and count == len(candidates):
            reason = "stop"
        block = Block(candidates if count == len(candidates) else candidates[:count], reason, hides_last)
        if self._stop_strings is not None:
            return self._search(block, self._stop_strings)
        self._num_output += count
        return block

    def decode(self, block: Block) -> tuple[str, ...]:
        """The text that each token of the latest block made certain; empty texts if none are wanted."""
        if block.texts is not None:
            return block.texts
        token_ids, reason, hides_last, _ = block
        if not self._with_text:
            return ("",) * len(token_ids)
        push = self._decoder.push
        if reason is None:
            return tuple([push(token_id) for token_id in token_ids])
        texts = [push(token_id) for token_id in (token_ids[:-1] if hides_last else token_ids)]
        rest = self._decoder.flush()
        return (*texts, rest) if hides_last else (*texts[:-1], texts[-1] + rest)

    def _search(self, block: Block, strings: StopStrings) -> Block:
        """Decodes and searches for stop strings, token by token."""
        token_ids, reason, hides_last, _ = block
        texts: tuple[str, ...] = ()
        for place, token_id in enumerate(token_ids, start=1):
            self._num_output += 1
            ends = reason is not None and place == len(token_ids)
            text, stopped = strings.feed("" if ends and hides_last else self._decoder.push(token_id))
            if ends and not stopped:
                rest, stopped = strings.feed(self._decoder.flush())
                text += rest if stopped else rest + strings.flush()
            texts += (text,)
            if stopped:
                return Block(token_ids[:place], "stop", texts=texts)
        return block._replace(texts=texts)
