"""Renders chat templates: the Jinja programs that models ship to turn messages into a prompt.

Templates are untrusted, so they run in a sandbox. Variables and settings follow the conventions of transformers, which
published templates rely on.
"""

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
    """``{% generation %}``: marks answers for training. Only its content is rendered here."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateRefusalError(jinja2.TemplateError):
    """Raised by ``raise_exception`` in a template."""


def render_chat(
    template: str, messages: Sequence[Message], special_tokens: Mapping[str, str], add_generation_prompt: bool
) -> str:
    """Renders the prompt of these messages. ``special_tokens``: ``bos_token``, ``eos_token`` and so on."""
    checked = check_messages(messages)
    try:
        return _compile(template).render(
            messages=checked, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **special_tokens
        )
    except _TemplateRefusalError as error:
        raise PromptError("The chat template of the model rejects these messages", got=error.message) from error
    # A template is a program and may fail in any way; every failure is due to the template or the messages.
    except Exception as error:
        raise PromptError(
            "The chat template of the model failed",
            got=f"{type(error).__name__}: {error}",
            next_step="Check the messages, or generate from a plain prompt instead.",
        ) from error


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns the messages as dictionaries; an invalid message is refused by its index."""
    shape = "a list of {'role': 'user', 'content': '...'}"
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise PromptError("A chat needs a list of messages", got=repr(messages)[:80], allowed=shape)
    if not messages:
        raise PromptError("A chat needs at least one message", got="none", allowed=shape)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(f"Message {index} must be an object with 'role' and 'content'", got=repr(message)[:80])
        for field in ("role", "content"):
            value = message.get(field)
            if not isinstance(value, str):
                given = "nothing" if field not in message else repr(value)[:80]
                raise PromptError(f"Message {index} needs a text as its {field}", got=given, allowed=shape)
        if not message["role"]:
            raise PromptError(f"Message {index} has an empty role", allowed=shape)
    return [dict(message) for message in messages]


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
