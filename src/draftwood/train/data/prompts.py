"""Prompts to be answered, out of files.

A ``.jsonl`` file has one object a line, a ``.json`` file a list of them: ``{"turns": [...]}`` with what the user says
turn by turn, ``{"messages": [{"role", "content"}]}`` or ShareGPT's ``{"conversations": [{"from", "value"}]}``. Any
other file is text with one prompt a line; empty lines are left out everywhere.

What is malformed is an error that names the file and the line. A conversation in which somebody says nothing (or, where
answers are kept, in which nobody answers) is well formed and of no use: it is skipped and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftwood.corpus import has_lone_surrogate
from draftwood.disk import sha256_of
from draftwood.errors import PromptError
from draftwood.text import Message

SPEAKERS = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
}
_SHAPES = "an object with 'turns', 'messages' or 'conversations'"


class Prompt(NamedTuple):
    """A conversation to be had with the target."""

    place: str  # for messages: the file and the line
    messages: tuple[Message, ...]  # of the system and the user, in turn; with answers only where they are kept


class Source(NamedTuple):
    """A file of prompts, as the manifest names it."""

    name: str
    sha256: str
    prompts: int  # taken
    skipped: int  # somebody says nothing


def read_sources(
    files: Sequence[str], limit: int | None = None, *, keep_answers: bool = False
) -> tuple[list[Prompt], list[Source]]:
    """The prompts of all files in order, ``limit`` of them at most."""
    prompts: list[Prompt] = []
    sources: list[Source] = []
    for file in files:
        path = Path(file)
        taken = skipped = 0
        for prompt in read_file(path):
            if limit is not None and len(prompts) >= limit:
                break
            usable = _with_answers(prompt) if keep_answers else _without_answers(prompt)
            if usable is None:
                skipped += 1
            else:
                prompts.append(usable)
                taken += 1
        if not taken and (limit is None or len(prompts) < limit):
            raise PromptError(f"{file} has no prompts", got=f"{skipped} skipped", allowed="one prompt a line")
        sources.append(Source(path.name, sha256_of(path), taken, skipped))
    return prompts, sources


def read_file(path: Path) -> Iterator[Prompt]:
    """The conversations of a file as it has them."""
    if path.suffix == ".json":
        yield from _of_list(path)
        return
    for number, line in enumerate(_content(path).split(b"\n"), start=1):
        place = f"{path}, line {number}"
        text = _decoded(line, place).strip()
        if text:
            is_json = path.suffix == ".jsonl"
            yield _of_row(_parsed(text, place, _SHAPES), place) if is_json else _of_turns([text], place)


def _of_list(path: Path) -> Iterator[Prompt]:
    allowed = f"a list, each entry {_SHAPES}"
    rows = _parsed(_decoded(_content(path), str(path)), str(path), allowed)
    if not isinstance(rows, list):
        raise PromptError(f"{path} is no list", got=type(rows).__name__, allowed=allowed)
    for number, row in enumerate(rows, start=1):
        yield _of_row(row, f"{path}, entry {number}")


def _of_row(row: Any, place: str) -> Prompt:
    fields = row if isinstance(row, Mapping) else {}
    turns = fields.get("turns")
    if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):
        return _of_turns(turns, place)
    for field, speaker, text in (("messages", "role", "content"), ("conversations", "from", "value")):
        said = fields.get(field)
        if isinstance(said, list):
            return _checked(Prompt(place, tuple(_message(entry, speaker, text, place) for entry in said)))
    raise PromptError(
        f"{place} has no prompt",
        got=f"the fields {', '.join(map(str, fields))}" if fields else ascii(row)[:80],
        allowed=_SHAPES,
    )


def _of_turns(turns: Sequence[str], place: str) -> Prompt:
    return _checked(Prompt(place, tuple({"role": "user", "content": turn} for turn in turns)))


def _message(entry: Any, speaker: str, text: str, place: str) -> Message:
    fields = entry if isinstance(entry, Mapping) else {}
    who, said = fields.get(speaker), fields.get(text)
    if not isinstance(said, str) or not isinstance(who, str):
        raise PromptError(f"{place} has a message without {speaker!r} and {text!r} as texts", got=ascii(entry)[:80])
    if who.lower() not in SPEAKERS:
        raise PromptError(f"{place} has a message of an unknown speaker", got=repr(who), allowed=SPEAKERS)
    return {"role": SPEAKERS[who.lower()], "content": said}


def _checked(prompt: Prompt) -> Prompt:
    for message in prompt.messages:
        if has_lone_surrogate(message["content"]):
            raise PromptError(f"{prompt.place} is not valid Unicode", got=ascii(message["content"])[:80])
    return prompt


def _without_answers(prompt: Prompt) -> Prompt | None:
    """What the user says, and the system before that; None where that is nothing."""
    first = next((place for place, message in enumerate(prompt.messages) if message["role"] == "user"), 0)
    rules = [message for message in prompt.messages[:first] if message["role"] == "system" and _says(message)]
    turns = [message for message in prompt.messages if message["role"] == "user"]
    return prompt._replace(messages=(*rules, *turns)) if turns and all(map(_says, turns)) else None


def _with_answers(prompt: Prompt) -> Prompt | None:
    """Everything up to the last answer; None where nobody asks, or nobody answers."""
    answers = [place for place, message in enumerate(prompt.messages) if message["role"] == "assistant"]
    messages = prompt.messages[: answers[-1] + 1] if answers else ()
    usable = messages and messages[0]["role"] != "assistant" and all(map(_says, messages))
    return prompt._replace(messages=messages) if usable else None


def _says(message: Message) -> bool:
    return bool(message["content"].strip())


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PromptError(f"{path} cannot be read", got=error.strerror or error) from error


def _decoded(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{place} is no UTF-8 text", got=error.reason) from error


def _parsed(text: str, place: str, allowed: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""  # else the place says it
        raise PromptError(
            f"{place} is not valid JSON", got=f"{error.msg} at {line}column {error.colno}", allowed=allowed
        ) from error
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{place} is not valid JSON", got=error, allowed=allowed) from error
