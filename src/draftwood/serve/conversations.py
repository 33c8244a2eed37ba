"""Conversations of requests, in the forms of three APIs, as messages for a chat template."""

import json
from collections.abc import Callable
from typing import Any

from draftwood.serve.errors import ApiError
from draftwood.serve.fields import Fields
from draftwood.serve.requests import RequestLimits, check_length, parse_content, too_long
from draftwood.serve.tools import parse_call, parse_result, parse_tool_message

ChatMessage = dict[str, Any]  # "role" and "content"; more for calls of tools

ROLE_ALIASES = {"developer": "system"}  # chat templates only know the second name
RESPONSES_TEXT = ("input_text", "output_text", "text")
THOUGHTS = ("thinking", "redacted_thinking")  # of earlier turns: no model of ours wrote them


def parse_messages(fields: Fields, limits: RequestLimits) -> list[ChatMessage]:
    """``messages`` of OpenAI's chats."""
    return _parse_all(fields, "messages", _parse_chat_message, limits)


def parse_anthropic(fields: Fields, limits: RequestLimits) -> list[ChatMessage]:
    """``system`` and ``messages`` of Anthropic's API."""
    system = parse_content(fields.get("system"), "system")
    messages = _parse_all(fields, "messages", _parse_blocks, limits)
    check_length(len(system), limits, "system")
    return [{"role": "system", "content": system}, *messages] if system else messages


def parse_input(fields: Fields, limits: RequestLimits) -> list[ChatMessage]:
    """``instructions`` and ``input`` of OpenAI's responses: a text, or items."""
    instructions = parse_content(fields.get("instructions"), "instructions")
    given = fields.get("input")
    if isinstance(given, str) and given:
        given = [{"role": "user", "content": given}]
    messages = _join_calls(_parse_all({"input": given}, "input", _parse_item, limits))
    check_length(len(instructions), limits, "instructions")
    return [{"role": "system", "content": instructions}, *messages] if instructions else messages


def _parse_all(
    fields: Fields, name: str, parse: Callable[[dict[str, Any], str], list[ChatMessage]], limits: RequestLimits
) -> list[ChatMessage]:
    given = fields.get(name)
    if not isinstance(given, list) or not given:
        raise ApiError(f"{name} must be a list with at least one message", param=name)
    if len(given) > limits.context_length:
        raise too_long(f"{len(given)} messages", name)
    parsed: list[ChatMessage] = []
    for index, message in enumerate(given):
        param = f"{name}[{index}]"
        if not isinstance(message, dict):
            raise _no_message(param)
        parsed += parse(message, param)
    texts = [text for message in parsed for text in (message["role"], message["content"])]
    calls = [json.dumps(message["tool_calls"]) for message in parsed if "tool_calls" in message]
    check_length(sum(map(len, [*texts, *calls])), limits, name)
    return parsed


def _parse_chat_message(message: dict[str, Any], param: str) -> list[ChatMessage]:
    content = parse_content(message.get("content"), param)
    return [{"role": _role(message, param), "content": content, **parse_tool_message(message, param)}]


def _parse_item(item: dict[str, Any], param: str) -> list[ChatMessage]:
    """An item of OpenAI's responses: a message, a call, its result, or a thought."""
    kind = item.get("type") or "message"
    if kind == "reasoning":
        return []
    if kind == "function_call":
        call = parse_call(item.get("call_id"), item.get("name"), item.get("arguments"), param)
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]
    if kind == "function_call_output":
        return [parse_result(item.get("call_id"), parse_content(item.get("output"), param, RESPONSES_TEXT), param)]
    if kind != "message":
        raise ApiError("The item has an unknown type", got=repr(kind)[:80], param=param, code="unsupported_parameter")
    return [{"role": _role(item, param), "content": parse_content(item.get("content"), param, RESPONSES_TEXT)}]


def _parse_blocks(message: dict[str, Any], param: str) -> list[ChatMessage]:
    """A message of Anthropic's API: its content is a text, or blocks of text, calls and results."""
    role, content = _role(message, param), message.get("content")
    blocks = content if isinstance(content, list) and all(isinstance(block, dict) for block in content) else []
    kinds = [block.get("type") for block in blocks]
    rest = [block for block in blocks if block.get("type") not in ("tool_use", "tool_result", *THOUGHTS)]
    text = parse_content(rest if blocks else content, param)
    found = [
        parse_result(block.get("tool_use_id"), parse_content(block.get("content"), param), param)
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    calls = [
        parse_call(block.get("id"), block.get("name"), block.get("input"), param)
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    if calls:
        return [*found, {"role": role, "content": text, "tool_calls": calls}]
    return [*found, {"role": role, "content": text}] if text or "tool_result" not in kinds else found


def _join_calls(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Calls that follow each other, or a text, are one message."""
    joined: list[ChatMessage] = []
    for message in messages:
        if "tool_calls" in message and joined and joined[-1]["role"] == "assistant":
            calls = [*joined[-1].get("tool_calls", []), *message["tool_calls"]]
            joined[-1] = {**joined[-1], "tool_calls": calls}
        else:
            joined.append(message)
    return joined


def _role(message: dict[str, Any], param: str) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise _no_message(param)
    if role == "function":
        raise ApiError("Messages of functions are not supported", param=param, code="unsupported_parameter")
    return ROLE_ALIASES.get(role, role)


def _no_message(param: str) -> ApiError:
    return ApiError(f"{param} must be an object with 'role' and 'content'", param=param)
