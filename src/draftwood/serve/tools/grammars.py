"""Grammars of answers with calls: names and arguments match the tools."""

import json
from collections.abc import Mapping
from typing import Any

from draftwood.config import Structured
from draftwood.serve.errors import ApiError
from draftwood.serve.tools.formats import ToolFormat
from draftwood.serve.tools.requests import Function, Tools
from draftwood.structured import JSON_LAYOUT

Marks = Mapping[str, int]
NO_MARKS: Marks = {}
MAX_CALLS = 16  # in one answer that is bound to a grammar


def bind_answer(
    tools: Tools, form: ToolFormat, structured: Structured | None = None, marks: Marks = NO_MARKS
) -> Structured | None:
    """What the answer must match: calls where they are required, and else calls, or the structure of the request.

    None: any text. Where the model chooses, calls are bound only if the request asks for it: a strict function, or a
    schema for answers without a call. ``marks``: those of the format that are special tokens.
    """
    if structured is not None and structured.kind != "json_schema":
        raise ApiError(f"{structured.kind} cannot be combined with tools", param=structured.kind)
    if tools.required:
        return Structured(grammar=f"start: calls\n{_calls(tools, form, marks)}")
    if structured is not None:
        answer = f"answer: {json_rule(structured)}"
        return Structured(grammar=f"start: calls | answer\n{answer}\n{_calls(tools, form, marks)}")
    if not any(function.strict for function in tools.functions):
        return None
    return Structured(grammar=_text_with_calls(tools, form, marks))


def _calls(tools: Tools, form: ToolFormat, marks: Marks) -> str:
    """The rule of one or several calls."""
    more = f"({_quote(form.separator)} call){{0,{MAX_CALLS - 1}}}" if tools.parallel and form.several else ""
    mark = _quote(form.mark, marks) if form.mark in marks else ""
    lines = [f"calls: {_join(mark, _quote(form.start), 'call', more, _quote(form.end))}"]
    lines.append(f"call: {_join(_quote(form.opening, marks), 'body', _quote(form.closing))}")
    return "\n".join([*lines, _bodies(tools, form, marks)])


def _bodies(tools: Tools, form: ToolFormat, marks: Marks) -> str:
    """The rule of a call without marks."""
    functions = tools.callable_functions
    lines = ["body: " + " | ".join(f"body{index}" for index in range(len(functions)))]
    for index, function in enumerate(functions):
        if form.middle:
            head = _join(_quote(function.name), _quote(form.middle, marks))
            arguments = _schema(_parameters(function, index), function.strict)
            lines += [f"body{index}: {head} arguments{index}", f"arguments{index}: %json {arguments}"]
            continue
        properties = {"name": {"const": function.name}, form.arguments: _parameters(function, index)}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        lines.append(f"body{index}: %json {_schema({**schema, 'additionalProperties': False}, function.strict)}")
    return "\n".join(lines)


def _text_with_calls(tools: Tools, form: ToolFormat, marks: Marks) -> str:
    """The grammar of any text with any calls: marks begin a call, and text goes on after it."""
    if not form.anywhere:
        first = (form.start or "{").replace("[", "\\[")
        return f"start: calls | text\ntext: /[^{first}](.|\\n)*/\n{_calls(tools, form, marks)}"
    mark = form.opening.rstrip()
    rest = form.opening.removeprefix(mark)
    many = f"(head call){{0,{MAX_CALLS if tools.parallel else 1}}} text"
    head = f"head: text {_quote(mark, marks)}" if mark in marks else f"head[lazy]: TEXT {_quote(mark)}"
    lines = [f"start: {many}", "text: TEXT", "TEXT: /(.|\\n)*/", head]
    lines.append(f"call: {_join(_quote(rest), 'body', _quote(form.closing))}")
    return "\n".join([*lines, _bodies(tools, form, marks)])


def _parameters(function: Function, index: int) -> Mapping[str, Any]:
    """The schema of the arguments: an object. With an id, its references stay within it."""
    return {"type": "object", "$id": f"urn:draftwood:tool{index}", **function.parameters}


def json_rule(structured: Structured) -> str:
    """What a rule of a grammar has in place of a JSON schema."""
    return f"%json {_schema(json.loads(structured.text), structured.strict)}"


def _schema(schema: Mapping[str, Any], strict: bool) -> str:
    return json.dumps({**schema, "x-guidance": {**JSON_LAYOUT, "lenient": not strict}})


def _quote(text: str, marks: Marks = NO_MARKS) -> str:
    if text in marks:
        return f"<[{marks[text]}]>"
    return json.dumps(text) if text else ""


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)
