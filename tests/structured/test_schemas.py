"""JSON schemas of many kinds: every answer that ends validates, on random weights and on the default model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from draftwood import LLM, Completion, SamplingParams, Structured
from draftwood.models import ModelFolder
from tests.tools.engine import make_llm

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")


def obj(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    required = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **required, **more}


WORD = {"type": "string", "maxLength": 8}
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": obj({"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 120}, "tall": {"type": "boolean"}}),
    "nested": obj({"a": obj({"b": obj({"c": obj({"d": {"enum": [1, "two", None, [3]]}})})}), "e": {"const": "end"}}),
    "optional": {**obj({"a": WORD, "b": {"type": "integer", "maximum": 9}, "c": {"type": "null"}}), "required": ["c"]},
    "array": {
        "type": "array",
        "items": obj({"x": {"type": "integer", "minimum": -5, "maximum": 5}}),
        "minItems": 2,
        "maxItems": 4,
    },
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, WORD], "items": False, "minItems": 2},
    "numbers": obj(
        {
            "i": {"type": "integer", "exclusiveMinimum": 10, "maximum": 20},
            "f": {"type": "number", "minimum": 0, "maximum": 1},
            "m": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
        }
    ),
    "patterns": obj(
        {
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "date": {"type": "string", "format": "date"},
            "id": {"type": "string", "format": "uuid"},
        }
    ),
    "anyOf": obj({"v": {"anyOf": [{"type": "integer", "maximum": 99}, WORD, obj({"k": {"type": "null"}})]}}),
    "types": obj({"v": {"type": ["boolean", "null"]}, "w": {"oneOf": [{"type": "null"}, {"type": "boolean"}]}}),
    "allOf": {
        "allOf": [
            obj({"a": WORD}, additionalProperties=True),
            {"properties": {"b": {"enum": [1, 2]}}, "required": ["b"]},
        ],
        "maxProperties": 2,
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer", "maximum": 9}, "maxProperties": 2},
    "keys": {
        "type": "object",
        "patternProperties": {"^[a-c]{1,2}$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "list": {
        "$defs": {
            "item": obj({"value": {"enum": [1, 2]}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/item"}]}})
        },
        "$ref": "#/$defs/item",
    },
    "tree": {
        "$defs": {
            "node": obj({"name": WORD, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}})
        },
        "$ref": "#/$defs/node",
    },
    "expression": {
        "$defs": {
            "e": {
                "anyOf": [
                    {"enum": [0, 1]},
                    {
                        "type": "array",
                        "prefixItems": [{"enum": ["+", "*"]}, {"$ref": "#/$defs/e"}, {"$ref": "#/$defs/e"}],
                        "items": False,
                        "minItems": 3,
                    },
                ]
            }
        },
        "$ref": "#/$defs/e",
    },
    "enum": {"enum": [f"value number {n}" for n in range(300)]},
    "unicode": obj({"größe": {"enum": ["zwölf", "日本", "🌲"]}, "naïve key": {"type": "boolean"}}),
    "object": {"type": "object"},
}


def check(completion: Completion, schema: dict[str, Any]) -> bool:
    """Whether the answer ended; then it must validate."""
    assert "  " not in completion.text or '"' in completion.text
    if completion.finish_reason == "length":
        return False
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(
        json.loads(completion.text)
    )
    return True


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with make_llm(budget=12, drafter="goose") as llm:
        yield llm


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_of_a_random_model_validate(tiny: LLM, name: str) -> None:
    schema = SCHEMAS[name]
    kinds = [
        SamplingParams(max_tokens=200, structured=Structured(json_schema=schema)),
        SamplingParams(max_tokens=200, structured=Structured(json_schema=schema), temperature=1.0, seed=3, n=4),
    ]
    ended = [check(answer, schema) for params in kinds for answer in tiny.generate("hello", params)]
    assert any(ended) or name in ("object", "map")  # random weights rarely leave a free text


@pytest.fixture(scope="module")
def default_llm(smollm2: ModelFolder) -> Iterator[LLM]:
    with LLM(smollm2.path, budget=8, cache_tokens=4096) as llm:
        yield llm


@pytest.mark.model
def test_answers_of_the_default_model_validate(default_llm: LLM) -> None:
    ended = []
    for name, schema in SCHEMAS.items():
        messages = [{"role": "user", "content": f"Give an example of JSON for the schema {json.dumps(schema)[:800]}"}]
        params = SamplingParams(max_tokens=160, structured=Structured(json_schema=schema))
        drafted, plain = (default_llm.chat(messages, params, drafter=drafter)[0] for drafter in ("goose", "plain"))
        assert drafted.token_ids == plain.token_ids, name
        ended.append(check(drafted, schema))
    assert sum(ended) >= len(ended) - 3
