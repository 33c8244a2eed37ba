"""Prompts from text and files, as requests to the model rather than text to continue."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwood.disk import parse_json
from draftwood.errors import OptionError, PromptError
from draftwood.text import TextCodec

Message = Mapping[str, str]
Conversation = Sequence[Message]


def prompt_ids(
    codec: TextCodec, prompt: str | Conversation, *, raw: bool = False, system: str | None = None
) -> list[int]:
    """Encode a request: with the chat template if the model has one, or unchanged with ``raw``.

    ``system`` is a system message, which needs a chat template.
    """
    messages = _user_message(prompt) if isinstance(prompt, str) else list(prompt)
    as_chat = codec.has_chat and not raw
    # White space is an empty chat message, but a valid text to continue.
    if not any(message["content"].strip() if as_chat else message["content"] for message in messages):
        raise PromptError("The prompt is empty", next_step="Give at least one word.")
    if system and not as_chat:
        raise PromptError(
            "A system message needs a chat template",
            got="a raw text to continue" if raw else "a model without one",
            next_step="Put the instruction into the prompt, or use a chat model without --raw.",
        )
    if as_chat:
        return codec.apply_chat([{"role": "system", "content": system}, *messages] if system else messages)
    return codec.encode("\n\n".join(message["content"] for message in messages))


def read_text(path: str | Path) -> str:
    """Read a UTF-8 text file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"{path} cannot be read", got=error.strerror or error) from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not valid UTF-8", got=error.reason) from error


def read_prompts(path: str | Path, limit: int | None = None) -> list[Conversation]:
    """Read the prompts of a file; empty lines are skipped.

    A ``.jsonl`` file has one object per line with ``messages``, ``prompt`` or ``turns``. Only the first turn is used,
    since the others depend on an answer. Any other file is text with one prompt per line.
    """
    if limit is not None and limit < 1:
        raise OptionError("The limit on prompts is out of range", got=limit, allowed="1 or more")
    is_json = Path(path).suffix == ".jsonl"
    prompts: list[Conversation] = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip() and (limit is None or len(prompts) < limit):
            prompts.append(_parse_line(line, f"{path}, line {number}") if is_json else _user_message(line.strip()))
    if not prompts:
        raise PromptError(f"{path} has no prompts", allowed="one prompt per line")
    return prompts


def _user_message(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _parse_line(line: str, place: str) -> Conversation:
    shape = "an object with 'messages', 'prompt' or 'turns'"
    try:
        entry: Any = parse_json(line)
    except ValueError as error:
        raise PromptError(f"{place} is not valid JSON", got=error) from error
    if isinstance(entry, Mapping):
        turns = entry.get("turns")
        text = entry.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
        if isinstance(text, str):
            return _user_message(text)
        messages = entry.get("messages")
        if isinstance(messages, list) and messages and all(_is_message(message) for message in messages):
            return messages
    raise PromptError(f"{place} has no prompt", got=line[:80], allowed=shape)


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
