"""What an answer must match: ``response_format`` of OpenAI's API, and the extensions ``regex`` and ``grammar``."""

from collections.abc import Mapping
from typing import Any

from draftwood.config import SamplingParams, Structured
from draftwood.errors import DraftwoodError, OptionError
from draftwood.llm import LLM
from draftwood.serve.errors import ApiError

STRUCTURE_FIELDS = ("response_format", "regex", "grammar")
FORMAT_TYPES = ("text", "json_object", "json_schema")
ANY_OBJECT = {"type": "object"}


def parse_structured(fields: Mapping[str, Any]) -> Structured | None:
    """The structure that a request asks for, in one of the fields."""
    given = [name for name in STRUCTURE_FIELDS if fields.get(name) is not None]
    if "response_format" in given and (schema := _parse_format(fields["response_format"])) is None:
        given.remove("response_format")
    if not given:
        return None
    if len(given) > 1:
        raise ApiError("An answer can match one structure", got=", ".join(given), param=given[1])
    (name,) = given
    try:
        if name == "response_format":
            assert schema is not None
            return Structured(json_schema=schema[0], strict=schema[1])
        return Structured(**{name: fields[name]})
    except OptionError as error:
        raise _name_field(error, name) from error


def _parse_format(value: object) -> tuple[dict[str, Any], bool] | None:
    """The schema, and whether it is strict; None: any text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in FORMAT_TYPES:
        what = "response_format must be an object with a known type"
        raise ApiError(what, got=repr(kind), allowed=FORMAT_TYPES, param="response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT, True
    about = value.get("json_schema")
    schema = about.get("schema", ANY_OBJECT) if isinstance(about, dict) else None
    if not isinstance(about, dict) or not isinstance(schema, dict):
        what = "response_format.json_schema must be an object with 'name' and 'schema'"
        raise ApiError(what, got=type(about).__name__, param="response_format")
    return schema, bool(about.get("strict"))


def compile_structure(llm: LLM, params: SamplingParams, fields: Mapping[str, Any]) -> None:
    """Compile it before the request starts, where nobody waits for it; a bad one is the client's error."""
    try:
        llm.compile_structure(params)
    except DraftwoodError as error:
        names = ("tools", *STRUCTURE_FIELDS, "text")  # the last one is of OpenAI's responses
        raise _name_field(error, next((name for name in names if fields.get(name)), "response_format")) from error


def _name_field(error: DraftwoodError, field: str) -> ApiError:
    error.param = field
    return ApiError.wrap(error)
