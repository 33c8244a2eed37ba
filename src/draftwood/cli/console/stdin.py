"""Prompts from where the user put them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from draftwood.errors import PromptError
from draftwood.prompts import read_text


def read_prompt(prompt: str | None, file: str | None = None) -> str:
    """The argument, the file, or standard input. Nothing at all is refused before a model is loaded for it."""
    text = _given(prompt, file)
    if not text:
        raise PromptError("The prompt is empty", next_step="Give at least one word.")
    return text


def _given(prompt: str | None, file: str | None) -> str:
    """A final line break is an editor's or ``echo``'s, not the user's."""
    if prompt is not None and file is not None:
        raise PromptError("There are two prompts", got=f"a text and the file {file}", allowed="one of them")
    if file is not None:
        return read_text(file).removesuffix("\n")
    if prompt is not None and prompt != "-":
        with _text_only():
            return _whole(prompt)
    if prompt is None and sys.stdin.isatty():
        raise PromptError("There is no prompt", next_step="Give one as an argument, with --file, or through a pipe.")
    with _text_only():
        return _whole(sys.stdin.read().removesuffix("\n"))


def piped_lines() -> Iterator[str]:
    with _text_only():
        for line in sys.stdin:
            yield _whole(line)


def typed_lines(prompt: str, style: str = "") -> Iterator[str]:
    """What a person types, line by line, until Ctrl-D. Ctrl-C throws a half-typed line away."""
    try:
        import readline  # noqa: F401 - gives input() arrow keys and a history

        # The marks tell readline which characters take no room.
        shown = f"\x01\x1b[{style}m\x02{prompt}\x01\x1b[0m\x02" if style else prompt
    except ImportError:
        shown = prompt
    while True:
        try:
            with _text_only():
                line = _whole(input(shown))
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        yield line


def _whole(text: str) -> str:
    text.encode()  # bytes that are no text come in as lone surrogates in some locales, and raise here
    return text


@contextmanager
def _text_only() -> Iterator[None]:
    try:
        yield
    except UnicodeError as error:
        raise PromptError("The prompt is no UTF-8 text", got=error) from error
