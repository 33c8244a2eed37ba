"""Calls and their results in a conversation, as chat templates expect them or explained in plain text."""

import json
from collections.abc import Mapping, Sequence
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
    """The fields of a message that concern calls, in the form that chat templates expect."""
    found: ChatMessage = {}
    if message.get("role") == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise ApiError("A message of a tool needs the tool_call_id that it answers", param=param)
        for name in ("tool_call_id", "name"):
            if isinstance(message.get(name), str):
                found[name] = message[name]
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list) or message.get("role") != "assistant":
            raise ApiError("tool_calls must be a list, in a message of the assistant", param=param)
        found["tool_calls"] = [_parse_call(call, param) for call in calls]
    return found


def _parse_call(call: object, param: str) -> ChatMessage:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError("A tool call must have a function with a name and arguments", got=repr(call)[:80], param=param)
    # Templates write arguments as JSON: text would be quoted twice.
    arguments: Any = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = function["arguments"]
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


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
