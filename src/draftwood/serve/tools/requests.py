"""The fields ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a request."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftwood.serve.errors import ApiError
from draftwood.serve.tools.formats import HERMES, ToolFormat

MAX_TOOLS = 128
NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
CHOICES = "'auto', 'none', 'required', or {'type': 'function', 'function': {'name': ...}}"


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    parameters: Mapping[str, Any]  # a JSON schema
    strict: bool  # whether calls must match the schema also where the model chooses to call


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that a request offers."""

    functions: tuple[Function, ...]
    definitions: tuple[Mapping[str, Any], ...]  # as given, for the chat template
    required: bool  # whether the answer must be a call
    named: str | None  # the one function that must be called
    parallel: bool  # whether there may be several calls
    form: ToolFormat = HERMES  # how the model writes calls
    marks: Mapping[str, int] = field(default_factory=dict)  # those of the format that are special tokens

    @property
    def callable_functions(self) -> tuple[Function, ...]:
        return tuple(function for function in self.functions if self.named in (None, function.name))


def parse_tools(fields: Mapping[str, Any]) -> Tools | None:
    """None: no tools, or the request forbids their use."""
    definitions = fields.get("tools")
    if definitions is not None and not isinstance(definitions, list):
        raise ApiError("tools must be a list", got=type(definitions).__name__, param="tools")
    if definitions and len(definitions) > MAX_TOOLS:
        raise ApiError("Too many tools", got=len(definitions), allowed=f"at most {MAX_TOOLS}", param="tools")
    functions = tuple(_parse_tool(tool, f"tools[{index}]") for index, tool in enumerate(definitions or ()))
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise ApiError("Two tools have the same name", got=", ".join(names)[:200], param="tools")
    required, named = _parse_choice(fields.get("tool_choice"), names)
    parallel = fields.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise ApiError("parallel_tool_calls must be true or false", got=repr(parallel), param="parallel_tool_calls")
    if not functions or fields.get("tool_choice") == "none":
        return None
    return Tools(functions, tuple(definitions or ()), required, named, parallel is not False and named is None)


def _parse_tool(tool: object, param: str) -> Function:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
    if not isinstance(function, dict):
        allowed = "{'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
        raise ApiError("A tool must be a function", got=repr(tool)[:80], allowed=allowed, param=param)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        allowed = "1 to 64 letters, digits, '_', '-' and '.'"
        raise ApiError("A function needs a name", got=repr(name)[:80], allowed=allowed, param=param)
    if parameters is not None and not isinstance(parameters, dict):
        raise ApiError("parameters must be a JSON schema", got=type(parameters).__name__, param=param)
    return Function(name, NO_PARAMETERS if parameters is None else parameters, function.get("strict") is True)


def _parse_choice(choice: object, names: list[str]) -> tuple[bool, str | None]:
    """Whether a call is required, and of which function."""
    if choice in (None, "auto", "none"):
        return False, None
    if not names:
        raise ApiError("tool_choice needs tools", got=repr(choice)[:80], param="tool_choice")
    if choice == "required":
        return True, None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        raise ApiError("tool_choice is unknown", got=repr(choice)[:80], allowed=CHOICES, param="tool_choice")
    if name not in names:
        raise ApiError(
            "tool_choice names no tool of the request", got=repr(name)[:80], allowed=names, param="tool_choice"
        )
    return True, str(name)
