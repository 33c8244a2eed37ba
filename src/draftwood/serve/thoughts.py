"""Thoughts of a model, between <think> and </think>, before its answer.

Models that were trained to think have a chat template that names these marks. Some templates open the thoughts, with
others the model does. A structure binds the answer after them, and the response has both apart.
"""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from draftwood.config import Structured
from draftwood.serve.tools import json_rule, special_marks
from draftwood.text import TextCodec

Thinking = Literal["no", "may", "begun"]

OPEN, CLOSE = "<think>", "</think>"
MAX_TAIL = 16  # tokens at the end of a prompt in which its last mark is looked for
BLANKS = " \t\r\n"


def thinking_of(prompt_ids: Sequence[int], codec: TextCodec) -> Thinking:
    """Whether an answer to this prompt begins with thoughts."""
    if CLOSE not in (codec.tool_template or ""):
        return "no"
    tail = codec.decode(prompt_ids[-MAX_TAIL:], skip_special=False).rstrip()
    return "begun" if tail.endswith(OPEN) else "no" if tail.endswith(CLOSE) else "may"


def bind_after_thoughts(structured: Structured, thinking: Thinking, codec: TextCodec) -> Structured:
    """The structure of an answer that follows any thoughts."""
    if thinking == "no":
        return structured
    marks = special_marks((OPEN, CLOSE), codec)
    opening, closing = (f"<[{marks[mark]}]>" if mark in marks else f'"{mark}"' for mark in (OPEN, CLOSE))
    begin = "" if thinking == "begun" else f"{opening} "
    lines = [
        f"start: {'thoughts' if thinking == 'begun' else 'thoughts?'} answer",
        f"thoughts: {begin}rest GAP",
        f"rest: TEXT {closing}" if CLOSE in marks else f"rest[lazy]: TEXT {closing}",
        "TEXT: /(.|\\n)*/",
        "GAP: /\\n{0,2}/",
        f"answer: {_rule(structured)}",
    ]
    return Structured(grammar="\n".join(lines))


def _rule(structured: Structured) -> str:
    if structured.kind == "json_schema":
        return json_rule(structured)
    if structured.kind == "regex":
        pattern = structured.text.replace("\n", "\\n")
        return "/" + re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", pattern) + "/"
    return f"%lark {{\n{structured.text}\n}}"


class Part(NamedTuple):
    thoughts: str = ""
    rest: str = ""  # the answer


class ThoughtReader:
    """Splits an answer that comes in parts; the result does not depend on how it is cut."""

    def __init__(self, thinking: Thinking) -> None:
        self._is_begun = thinking == "begun"
        self._is_done = thinking == "no"
        self._starts = True  # whether blanks may still be dropped
        self._text = ""  # not read yet

    def feed(self, text: str, *, is_last: bool) -> Part:
        self._text += text
        if not self._is_begun and not self._is_done:
            self._begin(is_last)
        thoughts = self._think(is_last) if self._is_begun and not self._is_done else ""
        if not self._is_done:
            return Part(thoughts)
        rest, self._text = self._text, ""
        if self._starts and self._is_begun:  # blanks between thoughts and answer
            rest = rest.lstrip(BLANKS)
            self._starts = not rest
        return Part(thoughts, rest)

    def _begin(self, is_last: bool) -> None:
        start = self._text.lstrip(BLANKS)
        if start.startswith(OPEN):
            self._text, self._is_begun = start[len(OPEN) :], True
        elif is_last or not OPEN.startswith(start):
            self._is_done = True

    def _think(self, is_last: bool) -> str:
        """The thoughts that are sure; the end of the text may be the start of the closing mark."""
        text, mark, after = self._text.partition(CLOSE)
        if mark:
            self._text, self._is_done = after, True
            size = len(text)
        else:
            started = (size for size in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:size]))
            size = len(text) if is_last else len(text) - next(started, 0)
            self._text = text[size:]
        return text[:size]
