"""Renders chat templates in a process of its own, with bounded memory. ``chat.py`` starts this file as a script.

Templates are Jinja programs of strangers. They run in a sandbox, but a sandbox bounds neither time nor memory.
Variables and settings follow the conventions of transformers, which published templates rely on.

Each line of standard input is an order as JSON, each line of standard output its result.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_BYTES = 1 << 30  # of this process
MAX_CHARACTERS = 1 << 25  # of a rendered prompt


class _GenerationTag(Extension):
    """``{% generation %}``: marks answers for training. Only its content is rendered here."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateRefusalError(jinja2.TemplateError):
    """Raised by ``raise_exception`` in a template."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, str | None]:
    """Renders a prompt: its ``text``, or why it is ``refused`` by the template, or why the template ``failed``."""
    try:
        given = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": None,
        }
        text = _compile(template).render(**given, **special_tokens)
    except _TemplateRefusalError as error:
        return {"refused": error.message}
    # A template is a program and may fail in any way; every failure is due to the template or the messages.
    except Exception as error:  # noqa: BLE001
        return {"failed": f"{type(error).__name__}: {error}"[:500]}
    return {"text": text} if len(text) <= MAX_CHARACTERS else {"failed": f"a prompt of {len(text)} characters"}


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    extensions: list[str | type[Extension]] = [loopcontrols, _GenerationTag]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which the models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise _TemplateRefusalError(message)


def _limit_memory() -> None:
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = MAX_BYTES if hard == resource.RLIM_INFINITY else min(MAX_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def main() -> None:
    _limit_memory()
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(json.dumps(render(**json.loads(line))).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
