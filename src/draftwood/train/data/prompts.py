"""Read prompts from files.

A ``.jsonl`` file has one object per line, a ``.json`` file a list of them: ``{"turns": [...]}`` with the turns of
the user, ``{"messages": [{"role", "content"}]}`` or ShareGPT's ``{"conversations": [{"from", "value"}]}``. Any
other file is text with one prompt per line. Empty lines are skipped everywhere.

Malformed input is an error that names the file and the line. Conversations with an empty message (or, if answers are
kept, without an answer) are skipped and counted.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftwood.corpus import has_lone_surrogate
from draftwood.disk import sha256_of
from draftwood.errors import PromptError
from draftwood.text import Message

ROLES = {
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
    """A conversation to run with the target."""

    place: str  # file and line, for error messages
    messages: tuple[Message, ...]  # of the system and the user; with answers only if they are kept


class Source(NamedTuple):
    """A file of prompts, as recorded in the manifest."""

    name: str
    sha256: str
    prompts: int  # taken
    skipped: int  # with an empty message


def read_sources(
    files: Sequence[str], limit: int | None = None, *, keep_answers: bool = False
) -> tuple[list[Prompt], list[Source]]:
    """Read the prompts of all files in order, at most ``limit``."""
    prompts: list[Prompt] = []
    sources: list[Source] = []
    for file in files:
        path = Path(file)
        taken = skipped = 0
        for prompt in read_file(path):
            if limit is not None and len(prompts) >= limit:
                break
            usable = _keep_answers(prompt) if keep_answers else _drop_answers(prompt)
            if usable is None:
                skipped += 1
            else:
                prompts.append(usable)
                taken += 1
        if not taken and (limit is None or len(prompts) < limit):
            raise PromptError(f"{file} has no prompts", got=f"{skipped} skipped", allowed="one prompt per line")
        sources.append(Source(path.name, sha256_of(path), taken, skipped))
    return prompts, sources


def read_file(path: Path) -> Iterator[Prompt]:
    """Read the conversations of a file unchanged."""
    if path.suffix == ".json":
        yield from _read_list(path)
        return
    for number, line in enumerate(_read_bytes(path).split(b"\n"), start=1):
        place = f"{path}, line {number}"
        text = _decode(line, place).strip()
        if text:
            is_json = path.suffix == ".jsonl"
            yield _parse_row(_parse_json(text, place, _SHAPES), place) if is_json else _make_prompt([text], place)


def _read_list(path: Path) -> Iterator[Prompt]:
    allowed = f"a list, each entry {_SHAPES}"
    rows = _parse_json(_decode(_read_bytes(path), str(path)), str(path), allowed)
    if not isinstance(rows, list):
        raise PromptError(f"{path} is not a list", got=type(rows).__name__, allowed=allowed)
    for number, row in enumerate(rows, start=1):
        yield _parse_row(row, f"{path}, entry {number}")


def _parse_row(row: Any, place: str) -> Prompt:
    fields = row if isinstance(row, Mapping) else {}
    turns = fields.get("turns")
    if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):
        return _make_prompt(turns, place)
    for field, speaker, text in (("messages", "role", "content"), ("conversations", "from", "value")):
        said = fields.get(field)
        if isinstance(said, list):
            return _check_unicode(Prompt(place, tuple(_parse_message(entry, speaker, text, place) for entry in said)))
    raise PromptError(
        f"{place} has no prompt",
        got=f"the fields {', '.join(map(str, fields))}" if fields else ascii(row)[:80],
        allowed=_SHAPES,
    )


def _make_prompt(turns: Sequence[str], place: str) -> Prompt:
    return _check_unicode(Prompt(place, tuple({"role": "user", "content": turn} for turn in turns)))


def _parse_message(entry: Any, speaker: str, text: str, place: str) -> Message:
    fields = entry if isinstance(entry, Mapping) else {}
    who, said = fields.get(speaker), fields.get(text)
    if not isinstance(said, str) or not isinstance(who, str):
        raise PromptError(f"{place} has a message without {speaker!r} and {text!r} as strings", got=ascii(entry)[:80])
    if who.lower() not in ROLES:
        raise PromptError(f"{place} has a message with an unknown role", got=repr(who), allowed=ROLES)
    return {"role": ROLES[who.lower()], "content": said}


def _check_unicode(prompt: Prompt) -> Prompt:
    for message in prompt.messages:
        if has_lone_surrogate(message["content"]):
            raise PromptError(f"{prompt.place} is not valid Unicode", got=ascii(message["content"])[:80])
    return prompt


def _drop_answers(prompt: Prompt) -> Prompt | None:
    """Return the user's messages and the system message before them; None if one is empty."""
    first = next((place for place, message in enumerate(prompt.messages) if message["role"] == "user"), 0)
    rules = [message for message in prompt.messages[:first] if message["role"] == "system" and _has_text(message)]
    turns = [message for message in prompt.messages if message["role"] == "user"]
    return prompt._replace(messages=(*rules, *turns)) if turns and all(map(_has_text, turns)) else None


def _keep_answers(prompt: Prompt) -> Prompt | None:
    """Return all messages up to the last answer; None if there is no question or answer."""
    answers = [place for place, message in enumerate(prompt.messages) if message["role"] == "assistant"]
    messages = prompt.messages[: answers[-1] + 1] if answers else ()
    usable = messages and messages[0]["role"] != "assistant" and all(map(_has_text, messages))
    return prompt._replace(messages=messages) if usable else None


def _has_text(message: Message) -> bool:
    return bool(message["content"].strip())


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PromptError(f"{path} cannot be read", got=error.strerror or error) from error


def _decode(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{place} is not UTF-8 text", got=error.reason) from error


def _parse_json(text: str, place: str, allowed: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""  # otherwise ``place`` has the line
        raise PromptError(
            f"{place} is not valid JSON", got=f"{error.msg} at {line}column {error.colno}", allowed=allowed
        ) from error
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{place} is not valid JSON", got=error, allowed=allowed) from error
