"""Grammars of answers with calls: names and arguments match the tools."""

import json
from collections.abc import Mapping
from typing import Any

from draftwood.config import Structured
from draftwood.serve.errors import ApiError
from draftwood.serve.tools.formats import ToolFormat
from draftwood.serve.tools.requests import Function, Tools
from draftwood.structured import JSON_LAYOUT

MAX_CALLS = 16  # in one answer that is bound to a grammar


def bind_answer(
    tools: Tools, form: ToolFormat, structured: Structured | None = None, mark: int | None = None
) -> Structured | None:
    """What the answer must match: calls where they are required, and else calls, or the structure of the request.

    None: any text. Where the model chooses, calls are bound only if the request asks for it: a strict function, or a
    schema for answers that are no calls. ``mark``: the special token before calls.
    """
    if structured is not None and structured.kind != "json_schema":
        raise ApiError(f"{structured.kind} cannot be combined with tools", param=structured.kind)
    if tools.required:
        return Structured(grammar=f"start: calls\n{_calls(tools, form, mark)}")
    if structured is not None:
        answer = f"answer: %json {_schema(json.loads(structured.text), structured.strict)}"
        return Structured(grammar=f"start: calls | answer\n{answer}\n{_calls(tools, form, mark)}")
    if not any(function.strict for function in tools.functions):
        return None
    return Structured(grammar=_text_with_calls(tools, form, mark))


def _calls(tools: Tools, form: ToolFormat, mark: int | None) -> str:
    """The rule of one or several calls."""
    more = f"({_quote(form.separator)} call){{0,{MAX_CALLS - 1}}}" if tools.parallel and form.several else ""
    token = "" if mark is None else f"<[{mark}]>"
    lines = [f"calls: {_join(token, _quote(form.start), 'call', more, _quote(form.end))}"]
    lines.append(f"call: {_join(_quote(form.opening), 'body', _quote(form.closing))}")
    return "\n".join([*lines, _bodies(tools, form)])


def _bodies(tools: Tools, form: ToolFormat) -> str:
    """The rule of a call without marks."""
    functions = tools.callable_functions
    lines = ["body: " + " | ".join(f"body{index}" for index in range(len(functions)))]
    for index, function in enumerate(functions):
        properties = {"name": {"const": function.name}, form.arguments: _parameters(function, index)}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        lines.append(f"body{index}: %json {_schema({**schema, 'additionalProperties': False}, function.strict)}")
    return "\n".join(lines)


def _text_with_calls(tools: Tools, form: ToolFormat, mark_id: int | None) -> str:
    """The grammar of any text with any calls: marks begin a call, and text goes on after it."""
    if not form.anywhere:
        first = (form.start or "{").replace("[", "\\[")
        return f"start: calls | text\ntext: /[^{first}](.|\\n)*/\n{_calls(tools, form, mark_id)}"
    mark = form.opening.rstrip()
    rest = form.opening.removeprefix(mark)
    many = f"(head call){{0,{MAX_CALLS if tools.parallel else 1}}} text"
    lines = [f"start: {many}", "text: TEXT", "TEXT: /(.|\\n)*/", f"head[lazy]: TEXT {_quote(mark)}"]
    lines.append(f"call: {_join(_quote(rest), 'body', _quote(form.closing))}")
    return "\n".join([*lines, _bodies(tools, form)])


def _parameters(function: Function, index: int) -> Mapping[str, Any]:
    """The schema of the arguments: an object. With an id, its references stay within it."""
    return {"type": "object", "$id": f"urn:draftwood:tool{index}", **function.parameters}


def _schema(schema: Mapping[str, Any], strict: bool) -> str:
    return json.dumps({**schema, "x-guidance": {**JSON_LAYOUT, "lenient": not strict}})


def _quote(text: str) -> str:
    return json.dumps(text) if text else ""


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)
