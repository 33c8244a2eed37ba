"""Conversations of requests, in the forms of three APIs, as messages for a chat template."""

from collections.abc import Collection
from typing import Any

from draftwood.serve.errors import ApiError
from draftwood.serve.fields import Fields
from draftwood.serve.requests import RequestLimits, check_length, parse_content, too_long

ChatMessage = dict[str, str]

ROLE_ALIASES = {"developer": "system"}  # chat templates only know the second name
TEXT = ("text",)
RESPONSES_TEXT = ("input_text", "output_text", "text")


def parse_messages(fields: Fields, limits: RequestLimits) -> list[ChatMessage]:
    """``messages`` of OpenAI's chats."""
    return _parse_all(fields, "messages", TEXT, limits)


def parse_anthropic(fields: Fields, limits: RequestLimits) -> list[ChatMessage]:
    """``system`` and ``messages`` of Anthropic's API."""
    system = parse_content(fields.get("system"), "system")
    messages = _parse_all(fields, "messages", TEXT, limits)
    check_length(len(system), limits, "system")
    return [{"role": "system", "content": system}, *messages] if system else messages


def parse_input(fields: Fields, limits: RequestLimits) -> list[ChatMessage]:
    """``instructions`` and ``input`` of OpenAI's responses: a text, or items."""
    instructions = parse_content(fields.get("instructions"), "instructions")
    given = fields.get("input")
    if isinstance(given, str) and given:
        given = [{"role": "user", "content": given}]
    messages = _parse_all({"input": given}, "input", RESPONSES_TEXT, limits)
    check_length(len(instructions), limits, "instructions")
    return [{"role": "system", "content": instructions}, *messages] if instructions else messages


def _parse_all(fields: Fields, name: str, kinds: Collection[str], limits: RequestLimits) -> list[ChatMessage]:
    messages = fields.get(name)
    if not isinstance(messages, list) or not messages:
        raise ApiError(f"{name} must be a list with at least one message", param=name)
    if len(messages) > limits.context_length:
        raise too_long(f"{len(messages)} messages", name)
    parsed = [_parse_message(message, f"{name}[{index}]", kinds) for index, message in enumerate(messages)]
    check_length(sum(len(message["role"]) + len(message["content"]) for message in parsed), limits, name)
    return parsed


def _parse_message(message: object, param: str, kinds: Collection[str]) -> ChatMessage:
    role = message.get("role") if isinstance(message, dict) else None
    if isinstance(message, dict) and _is_of_a_tool(message):
        raise ApiError("Tool calls are not supported", param=param, code="unsupported_parameter")
    is_item = kinds is RESPONSES_TEXT  # which may have a type
    known = not isinstance(message, dict) or not is_item or message.get("type") in (None, "message")
    if not isinstance(message, dict) or not isinstance(role, str) or not known:
        raise ApiError(f"{param} must be an object with 'role' and 'content'", param=param)
    return {"role": ROLE_ALIASES.get(role, role), "content": parse_content(message.get("content"), param, kinds)}


def _is_of_a_tool(message: dict[str, Any]) -> bool:
    content = message.get("content")
    kinds = [part.get("type") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    has_part = any(kind in ("tool_use", "tool_result") for kind in kinds)
    has_type = str(message.get("type")).startswith(("function_call", "custom_tool_call"))
    return bool(message.get("tool_calls")) or message.get("role") in ("tool", "function") or has_part or has_type
