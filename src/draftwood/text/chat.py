"""Chat templates: the small programs that models ship to turn messages into a prompt.

They come from strangers, so they run in a sandbox that can neither reach nor change anything. Names and settings follow
the conventions that published templates rely on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftwood.errors import PromptError

Message = Mapping[str, str]


class _GenerationTag(Extension):
    """``{% generation %}``: marks the answers for those who train on them. Here only what is inside counts."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateRefusalError(jinja2.TemplateError):
    """The template itself says that these messages are not for it."""


def render_chat(
    template: str,
    messages: Sequence[Message],
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
) -> str:
    """The prompt for these messages. ``special_tokens`` are the template's ``bos_token``, ``eos_token`` and so on."""
    checked = check_messages(messages)
    try:
        return _compiled(template).render(
            messages=checked,
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            **special_tokens,
        )
    except _TemplateRefusalError as error:
        raise PromptError("The model's chat template refuses these messages", got=error.message) from error
    # A template is a program: anything can go wrong in it, and all of it is the template's or the messages' fault.
    except Exception as error:
        raise PromptError(
            "The model's chat template failed",
            got=f"{type(error).__name__}: {error}",
            next_step="Check the messages, or use generate() with a prompt of your own making.",
        ) from error


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as plain dictionaries; what is no conversation is refused with the place of the fault."""
    shape = "a list of {'role': 'user', 'content': '...'}"
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise PromptError("A chat needs messages", got=type(messages).__name__, allowed=shape)
    if not messages:
        raise PromptError("A chat needs at least one message", got="none", allowed=shape)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(f"Message {index} is no message", got=type(message).__name__, allowed=shape)
        for field in ("role", "content"):
            value = message.get(field)
            if not isinstance(value, str):
                given = "nothing" if field not in message else type(value).__name__
                raise PromptError(f"Message {index} needs text as its {field}", got=given, allowed=shape)
        if not message["role"]:
            raise PromptError(f"Message {index} has an empty role", allowed=shape)
    return [dict(message) for message in messages]


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
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
    # Jinja's own filter escapes for HTML, which a model has never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise _TemplateRefusalError(message)
