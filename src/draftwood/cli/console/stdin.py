"""Read prompts from arguments, files and standard input."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from draftwood.errors import PromptError
from draftwood.prompts import read_text


def read_prompt(prompt: str | None, file: str | None = None) -> str:
    """Read the prompt from the argument, the file or standard input. Raise if it is empty."""
    text = _read_source(prompt, file)
    if not text:
        raise PromptError("The prompt is empty", next_step="Pass a non-empty prompt.")
    return text


def _read_source(prompt: str | None, file: str | None) -> str:
    """Strip one final line break, which editors and ``echo`` add."""
    if prompt is not None and file is not None:
        raise PromptError("Two prompts were given", got=f"a prompt and --file {file}", allowed="one of them")
    if file is not None:
        return read_text(file).removesuffix("\n")
    if prompt is not None and prompt != "-":
        with _convert_unicode_errors():
            return _check_unicode(prompt)
    if prompt is None and sys.stdin.isatty():
        raise PromptError("The prompt is missing", next_step="Pass it as an argument, with --file, or through a pipe.")
    with _convert_unicode_errors():
        return _check_unicode(sys.stdin.read().removesuffix("\n"))


def piped_lines() -> Iterator[str]:
    with _convert_unicode_errors():
        for line in sys.stdin:
            yield _check_unicode(line)


def typed_lines(prompt: str, style: str = "") -> Iterator[str]:
    """Read typed lines until Ctrl-D. Ctrl-C discards the current line."""
    try:
        import readline  # noqa: F401 - adds arrow keys and a history to input()

        # The marks enclose characters of zero width for readline.
        shown = f"\x01\x1b[{style}m\x02{prompt}\x01\x1b[0m\x02" if style else prompt
    except ImportError:
        shown = prompt
    while True:
        try:
            with _convert_unicode_errors():
                line = _check_unicode(input(shown))
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        yield line


def _check_unicode(text: str) -> str:
    text.encode()  # raises for lone surrogates, which represent invalid bytes in some locales
    return text


@contextmanager
def _convert_unicode_errors() -> Iterator[None]:
    try:
        yield
    except UnicodeError as error:
        raise PromptError("The prompt is not valid UTF-8", got=error) from error
