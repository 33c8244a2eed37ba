"""From accepted tokens to output: one by one, exactly as plain decoding would, until one ends it."""

from collections.abc import Sequence

from draftwood.config import SamplingParams
from draftwood.engine.stopping import StopStrings, StopTokens
from draftwood.text import IncrementalDecoder, TextCodec


class OutputWriter:
    """Applies the stop conditions of one sample and decodes its text.

    Text is decoded at once only where a stop string may end the output; otherwise ``decode`` may be called later.
    """

    __slots__ = (
        "_decoder", "_hides_last", "_num_output", "_stop_strings", "_stop_tokens", "_texts", "_with_text",
        "finish_reason",
    )  # fmt: skip

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
        self.finish_reason: str | None = None  # why the output has ended
        self._hides_last = False  # the last token ends the output and is not a part of its text
        self._texts: tuple[str, ...] = ()  # of the latest block, where stop strings are searched for

    def write(self, candidates: list[int], *, is_complete: bool = False) -> list[int]:
        """The candidates up to a stop condition: the next block of output. ``is_complete``: the output ends with the
        last candidate, which is a part of it."""
        stops, count, reason = self._stop_tokens, len(candidates), None
        if self._num_output + count >= stops.max_tokens or not stops.ends.isdisjoint(candidates):
            count, reason = stops.first(candidates, self._num_output)
        block = candidates if count == len(candidates) else candidates[:count]
        if reason is not None or is_complete:
            self._hides_last = reason == "stop"
            self.finish_reason = "stop" if is_complete and block is candidates else reason
        if self._stop_strings is not None:
            return self._search(block, self._stop_strings)
        self._num_output += count
        return block

    def decode(self, block: list[int]) -> tuple[str, ...]:
        """The text that each token of the latest block made certain; empty texts if none are wanted."""
        if self._stop_strings is not None:
            return self._texts
        if not self._with_text:
            return ("",) * len(block)
        push = self._decoder.push
        if self.finish_reason is None:
            return tuple([push(token_id) for token_id in block])
        texts = [push(token_id) for token_id in (block[:-1] if self._hides_last else block)]
        rest = self._decoder.flush()
        return (*texts, rest) if self._hides_last else (*texts[:-1], texts[-1] + rest)

    def _search(self, token_ids: list[int], strings: StopStrings) -> list[int]:
        """Decodes and searches for stop strings, token by token."""
        reason, hides_last, texts = self.finish_reason, self._hides_last, list[str]()
        for place, token_id in enumerate(token_ids, start=1):
            self._num_output += 1
            ends = reason is not None and place == len(token_ids)
            text, stopped = strings.feed("" if ends and hides_last else self._decoder.push(token_id))
            if ends and not stopped:
                rest, stopped = strings.feed(self._decoder.flush())
                text += rest if stopped else rest + strings.flush()
            texts.append(text)
            if stopped:
                self.finish_reason, token_ids = "stop", token_ids[:place]
                break
        self._texts = tuple(texts)
        return token_ids
