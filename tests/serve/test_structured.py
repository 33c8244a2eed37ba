"""Structured answers of the server, with OpenAI's client."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from draftwood.errors import CapabilityError
from draftwood.structured import StructureMatcher
from tests.tools.serve import NAME, Running, serving, user_message

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["oak", "ash"]}, "height": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "height"],
    "additionalProperties": False,
}


class Tree(BaseModel):
    kind: Literal["oak", "ash"]
    evergreen: bool
    leaves: Literal[1, 2] | None


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(drafter="goose") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def schema_format(schema: object, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def test_the_client_parses_answers(client: openai.OpenAI) -> None:
    for temperature in (0.0, 1.0):
        found = client.chat.completions.parse(
            model=NAME, messages=user_message("hi"), response_format=Tree, temperature=temperature, seed=3, n=2
        )
        for choice in found.choices:
            assert isinstance(choice.message.parsed, Tree)
            assert choice.finish_reason == "stop"


def test_streamed_answers_are_the_same(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": NAME, "messages": user_message("hi"), "temperature": 0.7, "seed": 5}
    whole = client.chat.completions.create(**fields, response_format=schema_format(SCHEMA, strict=True))
    with client.chat.completions.stream(**fields, response_format=Tree) as stream:
        stream.until_done()
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Tree)
    parts = client.chat.completions.create(**fields, response_format=schema_format(SCHEMA, strict=True), stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    assert set(json.loads(text)) == {"kind", "height"}


def test_regular_expressions_and_grammars(server: Running, client: openai.OpenAI) -> None:
    for extension in ({"regex": "(yes|no)"}, {"grammar": 'start: "yes" | "no"'}):
        chat = client.chat.completions.create(model=NAME, messages=user_message("hi"), extra_body=extension)
        assert chat.choices[0].message.content in ("yes", "no")
        plain = client.completions.create(model=NAME, prompt="hi", extra_body=extension)
        assert plain.choices[0].text in ("yes", "no")
        assert plain.choices[0].finish_reason == "stop"


def test_any_object(server: Running) -> None:
    found = server.chat(response_format={"type": "json_object"}, max_tokens=40, temperature=0).body["choices"][0]
    assert found["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": "json"}, "response_format", "known type"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "'name' and 'schema'"),
        ({"response_format": schema_format([1])}, "response_format", "'name' and 'schema'"),
        ({"response_format": schema_format({"type": "objct"})}, "response_format", "Invalid type"),
        ({"response_format": schema_format({"uniqueItems": True}, strict=True)}, "response_format", "uniqueItems"),
        ({"regex": "("}, "regex", "cannot be used"),
        ({"regex": 3}, "regex", "must be text"),
        ({"grammar": "start: nothing"}, "grammar", "cannot be used"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "one structure"),
        ({"regex": "a" * 300_000}, None, ""),
    ],
    ids=lambda each: str(each)[:60],
)
def test_mistakes_are_the_clients(server: Running, fields: dict[str, Any], param: str | None, message: str) -> None:
    found = server.chat(**fields)
    assert found.status in (400, 413)
    assert param is None or found.error["param"] == param
    assert message in found.error["message"]


def test_unsupported_keywords_are_ignored_if_the_schema_is_not_strict(server: Running) -> None:
    schema = {"type": "array", "items": {"enum": [1]}, "minItems": 1, "maxItems": 2, "uniqueItems": True}
    found = server.chat(response_format=schema_format(schema), temperature=0)
    assert json.loads(found.body["choices"][0]["message"]["content"]) in ([1], [1, 1])


def test_a_structure_that_becomes_too_complex_is_the_clients_error(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: StructureMatcher) -> None:
        raise CapabilityError("The output cannot go on within its structure", param="structured")

    assert server.chat(regex="[ab]{2,9}").status == 200  # it is compiled before it fails
    monkeypatch.setattr(StructureMatcher, "allowed", fail)
    found = server.chat(regex="[ab]{2,9}")
    assert (found.status, found.error["code"]) == (400, "not_supported")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with serving() as other:
        found = other.chat(regex="a")
        assert (found.status, found.error["code"]) == (400, "missing_package")
        assert "draftwood[structured]" in found.error["message"]
