"""Calls and their results in a conversation, as chat templates expect them or explained in plain text."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from draftwood.serve.errors import ApiError
from draftwood.serve.tools.formats import HERMES, mentions_tools
from draftwood.text import TextCodec

ChatMessage = dict[str, Any]

EXPLANATION = """\
You may call functions to answer the user. The functions, as JSON within <tools></tools>:
<tools>
{tools}
</tools>
To call a function, write its name and arguments as JSON within <tool_call></tool_call>:
<tool_call>
{{"name": "<function-name>", "arguments": <arguments-as-JSON-object>}}
</tool_call>"""


def parse_tool_message(message: Mapping[str, Any], param: str) -> ChatMessage:
    """The fields of a message of OpenAI's chats that concern calls, in the form that chat templates expect."""
    found: ChatMessage = {}
    if message.get("role") == "tool":
        found |= parse_result(message.get("tool_call_id"), "", param)
        del found["content"]
    calls = message.get("tool_calls")
    if not calls:
        return found
    if not isinstance(calls, list) or message.get("role") != "assistant":
        raise ApiError("tool_calls must be a list, in a message of the assistant", param=param)
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ApiError("A tool call must have a function", got=repr(call)[:80], param=param)
        parsed = parse_call(call.get("id"), function.get("name"), function.get("arguments"), param)
        found.setdefault("tool_calls", []).append(parsed)
    return found


def parse_call(call_id: object, name: object, arguments: object, param: str) -> ChatMessage:
    """A call. Templates write arguments as JSON: text would be quoted twice, so it is parsed."""
    if not isinstance(name, str) or not isinstance(call_id, str | None):
        raise ApiError("A call must have the name of a function, and an id", got=repr(name)[:80], param=param)
    if isinstance(arguments, str | None):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return {"id": call_id or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def parse_result(call_id: object, content: str, param: str) -> ChatMessage:
    if not isinstance(call_id, str):
        raise ApiError("A result needs the id of the call that it answers", got=repr(call_id)[:80], param=param)
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def encode_chat(codec: TextCodec, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[int]:
    """The prompt of a conversation, by the model's own template if that knows tools."""
    if mentions_tools(codec.tool_template):
        return codec.apply_chat(messages, tools=tools or None)
    return codec.apply_chat(explain_tools(messages, tools))


def explain_tools(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """The same conversation for a template without tools: they are explained to the model in the system message, and
    calls and results are written as text."""
    explained: list[ChatMessage] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            content, role = f"<tool_response>\n{content}\n</tool_response>", "user"
            if explained and explained[-1].get("is_result"):
                explained[-1]["content"] += f"\n{content}"
                continue
            explained.append({"role": role, "content": content, "is_result": True})
            continue
        for call in message.get("tool_calls", ()):
            body = json.dumps(call["function"], ensure_ascii=False)
            content = f"{content}\n{HERMES.opening}{body}{HERMES.closing}".lstrip("\n")
        explained.append({"role": role, "content": content})
    if tools:
        text = EXPLANATION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if explained and explained[0]["role"] == "system":
            explained[0]["content"] = f"{explained[0]['content']}\n\n{text}"
        else:
            explained.insert(0, {"role": "system", "content": text})
    return [{"role": message["role"], "content": message["content"]} for message in explained]
