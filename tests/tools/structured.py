"""Shared by the tests of structured output: a small vocabulary, and plain masked decoding by hand."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import torch

from draftwood import LLM
from draftwood.config import Structured
from draftwood.structured import Structure, StructureCompiler
from draftwood.text import TextCodec
from draftwood.text.bytes import ByteTokenizer
from tests.conftest import logits_after

PIECES = ("a", "b", "ab", "c")
END = len(PIECES)


class LetterTokenizer(ByteTokenizer):
    """Tokens of one and two letters, so that a text can be written in several ways, and an end token."""

    vocab_size = END + 1
    eos_token_ids = (END,)
    special_token_ids = frozenset((END,))

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [PIECES.index(piece) for piece in re.findall("ab|a|b|c", text)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join((*PIECES, "" if skip_special else "<end>")[i] for i in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self.decode([token_id], skip_special=False).encode()


def compile_for(codec: TextCodec, structured: Structured, *, ends: Sequence[int] | None = None) -> Structure:
    ends = codec.eos_token_ids if ends is None else ends
    return StructureCompiler(codec, codec.vocab_size, ends).compile(structured)


class Words:
    """The same language as a finite set of words over the letters: which tokens may follow, by looking at all words."""

    def __init__(self, pattern: str, max_letters: int = 7) -> None:
        texts = ("".join(w) for n in range(max_letters + 1) for w in itertools.product("abc", repeat=n))
        self._words = {word for word in texts if re.fullmatch(pattern, word)}
        self._prefixes = {word[:n] for word in self._words for n in range(len(word) + 1)}

    def allowed(self, tokens: Sequence[int]) -> list[int]:
        """Empty: the output is complete, or has ended."""
        if END in tokens:
            return []
        text = "".join(PIECES[token] for token in tokens)
        after = [token for token, piece in enumerate(PIECES) if text + piece in self._prefixes]
        return [*after, END] if after and text in self._words else after


def masked_greedy(llm: LLM, prompt: Sequence[int], structured: Structured, max_tokens: int) -> list[int]:
    """Plain masked decoding by hand, with a full pass for every token and a mask from a fresh matcher."""
    structure = compile_for(llm.tokenizer, structured)
    output: list[int] = []
    while len(output) < max_tokens:
        matcher = structure.start()
        assert matcher.take(output) == len(output)
        if matcher.is_complete:
            break
        logits = logits_after(llm._engine.target, [*prompt, *output])[-1]
        output.append(int(torch.where(matcher.allowed(), logits, -torch.inf).argmax()))
    return output
