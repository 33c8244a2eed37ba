"""Conversations of requests, in the forms of three APIs, as messages for a chat template.

The other APIs are translated to messages of OpenAI's chats first, which are then checked in one place.
"""

import json
from collections.abc import Collection, Iterator
from typing import Any

from draftwood.serve.errors import ApiError
from draftwood.serve.fields import Fields
from draftwood.serve.requests import RequestLimits, check_length, parse_content, too_long
from draftwood.serve.tools import parse_tool_message

ChatMessage = dict[str, Any]

ROLE_ALIASES = {"developer": "system"}  # chat templates only know the second name
TEXT = ("text",)
RESPONSES_TEXT = ("input_text", "output_text", "text")


def parse_messages(fields: Fields, limits: RequestLimits) -> list[ChatMessage]:
    """``messages`` of OpenAI's chats."""
    messages = _check_list(fields.get("messages"), "messages", limits)
    return _check_lengths([_parse_message(each, f"messages[{i}]") for i, each in enumerate(messages)], limits)


def parse_anthropic(fields: Fields, limits: RequestLimits) -> list[ChatMessage]:
    """``system`` and ``messages`` of Anthropic's API."""
    messages = _check_list(fields.get("messages"), "messages", limits)
    parsed = _system_message(parse_content(fields.get("system"), "system"))
    for index, message in enumerate(messages):
        param = f"messages[{index}]"
        parsed += [_parse_message(each, param) for each in _translate_blocks(message, param)]
    return _check_lengths(parsed, limits)


def parse_input(fields: Fields, limits: RequestLimits) -> list[ChatMessage]:
    """``instructions`` and ``input`` of OpenAI's responses: a text, or items."""
    given = fields.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) and given else given
    parsed = _system_message(parse_content(fields.get("instructions"), "instructions"))
    for index, item in enumerate(_check_list(items, "input", limits)):
        param = f"input[{index}]"
        message = _parse_message(_translate_item(item, param), param, RESPONSES_TEXT)
        if "tool_calls" in message and parsed and parsed[-1]["role"] == "assistant":  # several calls of one answer
            parsed[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            parsed.append(message)
    return _check_lengths(parsed, limits, "input")


def _translate_item(item: object, param: str) -> object:
    """A call of a tool, or its result, as a message; others as they are."""
    kind = item.get("type") if isinstance(item, dict) else None
    if not isinstance(item, dict) or kind in (None, "message"):
        return item
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        return {"role": "assistant", "tool_calls": [{"id": item.get("call_id", ""), "function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    allowed = "message, function_call, function_call_output"
    raise ApiError("This type of item is not supported", got=repr(kind)[:80], allowed=allowed, param=param)


def _translate_blocks(message: object, param: str) -> Iterator[object]:
    """A message, whose blocks may be calls of tools; their results become messages of their own."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(content, list):
        yield message
        return
    calls, texts = [], []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            result = parse_content(block.get("content"), param)
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input", {})}
            calls.append({"id": block.get("id", ""), "function": function})
        elif kind not in ("thinking", "redacted_thinking"):  # of other models
            texts.append(block)
    if texts or calls or not content:
        yield {"role": message.get("role"), "content": texts, "tool_calls": calls}


def _system_message(text: str) -> list[ChatMessage]:
    return [{"role": "system", "content": text}] if text else []


def _check_list(messages: object, name: str, limits: RequestLimits) -> list[Any]:
    if not isinstance(messages, list) or not messages:
        raise ApiError(f"{name} must be a list with at least one message", param=name)
    if len(messages) > limits.context_length:
        raise too_long(f"{len(messages)} messages", name)
    return messages


def _check_lengths(messages: list[ChatMessage], limits: RequestLimits, name: str = "messages") -> list[ChatMessage]:
    texts = [text for message in messages for text in (message["role"], message["content"])]
    calls = [json.dumps(message["tool_calls"]) for message in messages if "tool_calls" in message]
    check_length(sum(map(len, [*texts, *calls])), limits, name)
    return messages


def _parse_message(message: object, param: str, kinds: Collection[str] = TEXT) -> ChatMessage:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(role, str):
        raise ApiError(f"{param} must be an object with 'role' and 'content'", param=param)
    if role == "function":
        raise ApiError("Messages of functions are not supported", param=param, code="unsupported_parameter")
    content = parse_content(message.get("content"), param, kinds)
    return {"role": ROLE_ALIASES.get(role, role), "content": content, **parse_tool_message(message, param)}
