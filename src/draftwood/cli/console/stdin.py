"""Read prompts from arguments, files and standard input."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from select import select

from draftwood.errors import PromptError
from draftwood.prompts import read_text

BLOCK = '"""'  # encloses a message of several lines
DISCARD = "\x03"  # in place of a line: Ctrl-C discards what was typed so far
PATIENCE = 2.0  # seconds without input after which a command says what it waits for


def read_prompt(prompt: str | None, file: str | None = None) -> str:
    """Join the argument, the file and standard input, in this order. Raise if all of them are empty.

    ``cat notes.txt | draftwood generate "Summarise this"`` sends the request first, then the text. One final line
    break of each part is stripped, which editors and ``echo`` add.
    """
    parts: list[str] = []
    with _convert_unicode_errors():
        if prompt is not None and prompt != "-":
            parts.append(_check_unicode(prompt))
        if file is not None:
            parts.append(read_text(file).removesuffix("\n"))
        piped = prompt == "-" or not _is_interactive()
        if piped:
            parts.append(_check_unicode(_read_stdin().removesuffix("\n")))
    if not parts:
        raise PromptError("The prompt is missing", next_step="Pass it as an argument, with --file, or through a pipe.")
    text = "\n\n".join(part for part in parts if part)
    if not text:
        raise PromptError("The prompt is empty", next_step="Pass a non-empty prompt.")
    return text


def _is_interactive() -> bool:
    """Whether nothing is piped in. Standard input may be closed."""
    return sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.closed:
        return ""
    with suppress(OSError, ValueError):  # streams without a file descriptor, and pipes on Windows
        if not select([sys.stdin], [], [], PATIENCE)[0]:
            print("Reading standard input. Press Ctrl-D to end it, or add: < /dev/null", file=sys.stderr)
    return sys.stdin.read()


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
            line = DISCARD
        yield line


def join_lines(lines: Iterator[str]) -> Iterator[str]:
    """Join lines between two lines with three quotation marks, and a line that ends with a backslash with the next."""
    parts: list[str] = []
    in_block = False
    for line in lines:
        text = line.removesuffix("\n")
        if text == DISCARD:
            parts, in_block = [], False
            continue
        if in_block or text.strip().startswith(BLOCK):
            opening = text.strip().removeprefix(BLOCK) if not in_block else text
            in_block = not opening.rstrip().endswith(BLOCK)
            parts.append(opening if in_block else opening.rstrip().removesuffix(BLOCK))
        elif text.endswith("\\"):
            parts.append(text.removesuffix("\\"))
            continue
        else:
            parts.append(text)
        if not in_block:
            yield "\n".join(parts).strip("\n")
            parts = []
    if parts:
        yield "\n".join(parts).strip("\n")


def _check_unicode(text: str) -> str:
    text.encode()  # raises for lone surrogates, which represent invalid bytes in some locales
    return text


@contextmanager
def _convert_unicode_errors() -> Iterator[None]:
    try:
        yield
    except UnicodeError as error:
        raise PromptError("The prompt is not valid UTF-8", got=error) from error
