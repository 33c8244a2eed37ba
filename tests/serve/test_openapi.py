"""The OpenAPI document is true: its paths and fields are those of the server, and responses match it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from draftwood.serve.app import ROUTES
from draftwood.serve.fields import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from draftwood.serve.openapi import OPERATIONS
from tests.tools.serve import NAME, Running, serving, user_message

jsonschema = pytest.importorskip("jsonschema")

CHAT_BODY: dict[str, Any] = {"messages": user_message("hi"), "max_tokens": 4}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT_BODY),
    ("/v1/chat/completions", {**CHAT_BODY, "n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["x"], "seed": -1}),
    ("/v1/chat/completions", {**CHAT_BODY, "drafter": "goose", "budget": 4, "logit_bias": {"5": -1.5}, "tools": []}),
    ("/v1/chat/completions", {**CHAT_BODY, "prediction": {"type": "content", "content": "a"}, "temperature": None}),
    ("/v1/completions", {"prompt": "a", "echo": True}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "logprobs": 1}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 4, "instructions": "b"}),
    ("/v1/messages", {**CHAT_BODY, "system": "b", "stop_sequences": ["x"]}),
    ("/v1/messages/count_tokens", {"messages": user_message("hi")}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/tokenize", {"messages": user_message("a")}),
    ("/detokenize", {"tokens": [1, 2]}),
]
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {}),
    ("/v1/chat/completions", {**CHAT_BODY, "temperature": -1}),
    ("/v1/chat/completions", {**CHAT_BODY, "budget": 99}),
    ("/v1/chat/completions", {**CHAT_BODY, "drafter": "nobody"}),
    ("/v1/completions", {"prompt": ""}),
    ("/v1/responses", {"input": []}),
    ("/v1/messages", {"messages": user_message("a")}),
    ("/tokenize", {}),
    ("/detokenize", {"tokens": [-1]}),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(drafter="goose") as running:
        yield running


@pytest.fixture(scope="module")
def document(server: Running) -> Any:
    return server.request("/openapi.json").body


def check(document: Any, schema: Any, value: Any) -> bool:
    """Whether a value matches a schema of the document."""
    whole = {**schema, "components": document["components"]}
    return bool(jsonschema.Draft202012Validator(whole).is_valid(value))


def test_paths_are_those_of_the_server(document: Any) -> None:
    routes = {(route.path_format, method.lower()) for route in ROUTES for method in (route.methods or ()) - {"HEAD"}}
    assert routes == set(OPERATIONS)
    assert {(path, method) for path, methods in document["paths"].items() for method in methods} == routes


@pytest.mark.parametrize(
    ("name", "api"), [("Chat", CHAT), ("Completion", COMPLETIONS), ("Response", RESPONSES), ("Message", MESSAGES)]
)
def test_fields_are_those_of_requests(document: Any, name: str, api: Any) -> None:
    assert set(document["components"]["schemas"][f"{name}Request"]["properties"]) == api.known


def test_schemas_are_valid(document: Any) -> None:
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=str)
def test_valid_requests_and_their_responses(server: Running, document: Any, path: str, body: dict[str, Any]) -> None:
    operation = document["paths"][path]["post"]
    assert check(document, operation["requestBody"]["content"]["application/json"]["schema"], body)
    found = server.request(path, {"model": NAME, **body})
    assert found.status == 200
    assert check(document, operation["responses"]["200"]["content"]["application/json"]["schema"], found.body)


@pytest.mark.parametrize(("path", "body"), WRONG, ids=str)
def test_invalid_requests_and_their_errors(server: Running, document: Any, path: str, body: dict[str, Any]) -> None:
    operation = document["paths"][path]["post"]
    assert not check(document, operation["requestBody"]["content"]["application/json"]["schema"], body)
    found = server.request(path, body)
    assert found.status == 400
    assert check(document, operation["responses"]["4XX"]["content"]["application/json"]["schema"], found.body)


def test_responses_without_a_request(server: Running, document: Any) -> None:
    for path in ("/v1/models", f"/v1/models/{NAME}", "/health", "/openapi.json"):
        described = document["paths"][path.replace(f"/{NAME}", "/{name}")]["get"]["responses"]["200"]
        assert check(document, described["content"]["application/json"]["schema"], server.request(path).body)


def test_keys_are_described() -> None:
    with serving({"api_keys": ("right",)}) as server:
        document = server.request("/openapi.json").body
    assert set(document["components"]["securitySchemes"]) == {"bearer", "header"}
    for (path, method), _ in OPERATIONS.items():
        has_key = "security" in document["paths"][path][method]
        assert has_key is (path not in ("/health", "/openapi.json"))


@pytest.mark.slow
def test_schemathesis(server: Running) -> None:
    """Random requests, valid and invalid: no internal error, and every response matches the document."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from schemathesis import checks

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    wanted = (
        checks.not_a_server_error,
        checks.CHECKS.get_one("status_code_conformance"),
        checks.CHECKS.get_one("content_type_conformance"),
        checks.CHECKS.get_one("response_schema_conformance"),
    )
    for result in schema.get_all_operations():
        operation = result.ok()
        cases = st.one_of(*[operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode])

        @settings(
            max_examples=40,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        @given(cases)
        def try_one(case: Any) -> None:
            case.call_and_validate(checks=wanted)

        try_one()
