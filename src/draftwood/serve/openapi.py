"""The OpenAPI document of the server, from the fields that requests may have.

Schemas of requests say what is accepted; further fields are ignored. Responses say what is always there.
"""

from typing import Any

from draftwood import __version__
from draftwood.config import MAX_PENALTY, MAX_TEMPERATURE
from draftwood.serve.fields import CHAT, COMPLETIONS, MESSAGES, RESPONSES, ApiFields
from draftwood.serve.requests import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    REASONING_FORMATS,
    RequestLimits,
)

Json = dict[str, Any]

TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}
NUMBER: Json = {"type": "number"}
FLAG: Json = {"type": "boolean"}
OBJECT: Json = {"type": "object"}


def _list(items: Json, **more: Any) -> Json:
    return {"type": "array", "items": items, **more}


def _object(required: dict[str, Json], optional: dict[str, Json] | None = None, **more: Any) -> Json:
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_of(*values: Any) -> Json:
    return {"enum": list(values)}


def _number(low: float, high: float | None = None) -> Json:
    return {"type": "number", "minimum": low, **({} if high is None else {"maximum": high})}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _part(*kinds: str) -> Json:
    return _object({"type": _one_of(*kinds), "text": TEXT})


def _content(*kinds: str) -> Json:
    return {"anyOf": [TEXT, _list(_part(*kinds))]}


ROLE = _one_of("system", "developer", "user", "assistant")
MESSAGE = _object({"role": ROLE, "content": _content("text")})
FUNCTION = _object(
    {"name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}},
    {"description": {}, "parameters": _or_null({"type": "object", "description": "A JSON schema"}), "strict": {}},
)


def field_schemas(limits: RequestLimits) -> dict[str, Json]:
    """What each field of a request may be, null aside."""
    stop = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
    stops = {"anyOf": [stop, _list(stop, maxItems=MAX_STOPS)]}
    tokens = {"type": "integer", "minimum": 1}
    penalty = _number(-MAX_PENALTY, MAX_PENALTY)
    token_id = {"type": "integer", "minimum": 0, "maximum": limits.vocab_size - 1}
    bias = {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
    prompt = {"type": "string", "minLength": 1}
    ids = _list(token_id, minItems=1)
    schema_format = _object({"type": _one_of("text", "json_object", "json_schema")}, {"json_schema": OBJECT})
    return {
        "model": {"type": "string", "description": "Default: the first name of /v1/models"},
        "stream": FLAG,
        "stream_options": _object({}, {"include_usage": FLAG, "include_cycles": FLAG}),
        "max_tokens": tokens,
        "max_completion_tokens": tokens,
        "max_output_tokens": tokens,
        "temperature": _number(0, MAX_TEMPERATURE),
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": 0},
        "min_p": _number(0, 1),
        "repetition_penalty": _number(1 / MAX_PENALTY, MAX_PENALTY),
        "presence_penalty": penalty,
        "frequency_penalty": penalty,
        "seed": {"type": "integer"},
        "n": {"type": "integer", "minimum": 1, "maximum": limits.max_samples},
        "stop": stops,
        "stop_sequences": _list(stop, maxItems=MAX_STOPS),
        "stop_token_ids": _list(token_id, maxItems=MAX_STOP_TOKENS),
        "ignore_eos": FLAG,
        "logit_bias": {
            "type": "object",
            "additionalProperties": bias,
            "maxProperties": MAX_BIASES,
            "description": "By token id",
        },
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
        "logprobs": FLAG,
        "prediction": _object({"type": _one_of("content"), "content": _content("text")}),
        "drafter": _one_of(*limits.drafters),
        "budget": {"type": "integer", "minimum": 1, "maximum": limits.max_budget},
        "response_format": schema_format,
        "regex": {"type": "string", "minLength": 1},
        "grammar": {"type": "string", "minLength": 1},
        "messages": _list(MESSAGE, minItems=1),
        "prompt": {"anyOf": [prompt, _list(prompt, minItems=1), ids, _list(ids, minItems=1)]},
        "echo": FLAG,
        "reasoning_format": _one_of(*REASONING_FORMATS),
        "tools": _list(_object({"type": _one_of("function"), "function": FUNCTION})),
        "tool_choice": {"anyOf": [_one_of("auto", "none", "required"), OBJECT]},
        "parallel_tool_calls": FLAG,
        "input": {"anyOf": [prompt, _list(OBJECT, minItems=1)]},
        "instructions": TEXT,
        "text": _object({}, {"format": OBJECT}),
        "system": _content("text"),
    }


# Where an API has another form of a field than the one above.
SPECIAL: dict[str, dict[str, Json]] = {
    "Completion": {"logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}},
    "Response": {"tools": _list(OBJECT)},
    "Message": {
        "messages": _list(_object({"role": _one_of("user", "assistant"), "content": _content("text")}), minItems=1),
        "tools": _list(
            _object({"name": FUNCTION["properties"]["name"]}, {"description": {}, "input_schema": _or_null(OBJECT)})
        ),
        "tool_choice": _object({"type": _one_of("auto", "any", "tool", "none")}, {"name": TEXT}),
    },
}

DRAFTING = _object(
    {"passes": COUNT, "tokens_per_pass": NUMBER, "positions_per_pass": NUMBER, "tokens_per_second": NUMBER}
)
TIMINGS = _object(
    {
        **dict.fromkeys(("cache_n", "prompt_n", "predicted_n", "draft_n", "draft_n_accepted"), COUNT),
        **dict.fromkeys(("prompt_ms", "prompt_per_token_ms", "prompt_per_second"), NUMBER),
        **dict.fromkeys(("predicted_ms", "predicted_per_token_ms", "predicted_per_second"), NUMBER),
    },
    description="As llama.cpp's server returns them",
)
USAGE = _object(
    {
        **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), COUNT),
        "prompt_tokens_details": _object({"cached_tokens": COUNT}),
        "completion_tokens_details": _object(
            {"accepted_prediction_tokens": COUNT, "rejected_prediction_tokens": COUNT}
        ),
    }
)
COUNTS = {"usage": USAGE, "timings": TIMINGS, "draftwood": DRAFTING}
TOOL_CALL = _object({"id": TEXT, "type": _one_of("function"), "function": _object({"name": TEXT, "arguments": TEXT})})
FINISH = _one_of("stop", "length", "tool_calls")
BASICS = {"id": TEXT, "created": COUNT, "model": TEXT}
ANSWER = _object(
    {"role": _one_of("assistant"), "content": _or_null(TEXT)},
    {"reasoning_content": TEXT, "tool_calls": _list(TOOL_CALL)},
)
LOGPROBS = {"logprobs": _or_null(OBJECT)}
MODEL = _object(
    {
        "id": TEXT,
        "object": _one_of("model"),
        "created": COUNT,
        "owned_by": TEXT,
        "max_model_len": COUNT,
        "max_budget": COUNT,
        "drafter": TEXT,
        "drafters": _list(TEXT),
    }
)

SCHEMAS: dict[str, Json] = {
    "ChatAnswer": _object(
        {
            **BASICS,
            "object": _one_of("chat.completion"),
            "choices": _list(_object({"index": COUNT, "message": ANSWER, **LOGPROBS, "finish_reason": FINISH})),
            **COUNTS,
        }
    ),
    "CompletionAnswer": _object(
        {
            **BASICS,
            "object": _one_of("text_completion"),
            "choices": _list(_object({"index": COUNT, "text": TEXT, **LOGPROBS, "finish_reason": FINISH})),
            **COUNTS,
        }
    ),
    "ResponseAnswer": _object(
        {
            "id": TEXT,
            "object": _one_of("response"),
            "created_at": NUMBER,
            "status": _one_of("completed", "incomplete"),
            "model": TEXT,
            "output": _list(_object({"type": _one_of("message", "function_call"), "id": TEXT, "status": TEXT})),
            "usage": _object(dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), COUNT)),
            "timings": TIMINGS,
            "draftwood": DRAFTING,
        }
    ),
    "MessageAnswer": _object(
        {
            "id": TEXT,
            "type": _one_of("message"),
            "role": _one_of("assistant"),
            "model": TEXT,
            "content": _list(
                _object({"type": _one_of("text", "tool_use")}, {"text": TEXT, "name": TEXT, "input": OBJECT})
            ),
            "stop_reason": _one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
            "stop_sequence": _or_null(TEXT),
            "usage": _object({"input_tokens": COUNT, "output_tokens": COUNT, "cache_read_input_tokens": COUNT}),
            "timings": TIMINGS,
            "draftwood": DRAFTING,
        }
    ),
    "TokenCount": _object({"input_tokens": COUNT}),
    "Tokens": _object({"tokens": _list(COUNT), "count": COUNT, "max_model_len": COUNT}, {"token_strs": _list(TEXT)}),
    "Text": _object({"prompt": TEXT, "content": TEXT}),
    "Model": MODEL,
    "Models": _object({"object": _one_of("list"), "data": _list(MODEL)}),
    "Health": _object({"status": _one_of("ok", "failed"), "version": TEXT}),
    "Error": _object(
        {"error": _object({"message": TEXT, "type": TEXT}, {"param": _or_null(TEXT), "code": TEXT})},
        {"type": _one_of("error")},
    ),
}


def _request(api: ApiFields, name: str, required: list[str], limits: RequestLimits) -> Json:
    known = {**field_schemas(limits), **SPECIAL.get(name, {})}
    properties = {each: known[each] if each in required else _or_null(known[each]) for each in sorted(api.known)}
    return {"type": "object", "properties": properties, "required": required}


def request_schemas(limits: RequestLimits) -> dict[str, Json]:
    text, messages = {"type": "string"}, _list(MESSAGE, minItems=1)
    token_id = {"type": "integer", "minimum": 0, "maximum": limits.vocab_size - 1}
    message = _request(MESSAGES, "Message", ["messages", "max_tokens"], limits)
    counted = {name: message["properties"][name] for name in ("model", "system", "tools", "tool_choice")}
    flag = _or_null(FLAG)
    return {
        "ChatRequest": _request(CHAT, "Chat", ["messages"], limits),
        "CompletionRequest": _request(COMPLETIONS, "Completion", ["prompt"], limits),
        "ResponseRequest": _request(RESPONSES, "Response", ["input"], limits),
        "MessageRequest": message,
        "CountRequest": _object({"messages": message["properties"]["messages"]}, counted),
        "TokenizeRequest": {
            "anyOf": [
                _object({"prompt": text}, {"add_special_tokens": flag, "return_token_strs": flag}),
                _object({"content": text}, {"add_special": flag}),
                _object({"messages": messages}, {"add_generation_prompt": flag}),
            ]
        },
        "DetokenizeRequest": _object({"tokens": _list(token_id)}),
    }


# By path and method: what it does, its request, its response, and whether it can be a stream.
OPERATIONS: dict[tuple[str, str], tuple[str, str | None, str, bool]] = {
    ("/v1/chat/completions", "post"): ("Answer a conversation", "ChatRequest", "ChatAnswer", True),
    ("/v1/completions", "post"): ("Complete texts", "CompletionRequest", "CompletionAnswer", True),
    ("/v1/responses", "post"): ("Answer in the form of OpenAI's responses", "ResponseRequest", "ResponseAnswer", True),
    ("/v1/messages", "post"): ("Answer in the form of Anthropic's messages", "MessageRequest", "MessageAnswer", True),
    ("/v1/messages/count_tokens", "post"): ("Count the tokens of a prompt", "CountRequest", "TokenCount", False),
    ("/tokenize", "post"): ("Encode a text or a conversation", "TokenizeRequest", "Tokens", False),
    ("/detokenize", "post"): ("Decode token ids", "DetokenizeRequest", "Text", False),
    ("/v1/models", "get"): ("List the served model", None, "Models", False),
    ("/v1/models/{name}", "get"): ("Describe the served model", None, "Model", False),
    ("/health", "get"): ("Whether the server can generate", None, "Health", False),
    ("/metrics", "get"): ("Metrics for Prometheus", None, "", False),
    ("/openapi.json", "get"): ("This document", None, "", False),
}
WITHOUT_KEY = ("/health", "/openapi.json")


def openapi_document(limits: RequestLimits, *, needs_key: bool) -> Json:
    paths: Json = {}
    for (path, method), operation in OPERATIONS.items():
        described = _operation(path, *operation)
        if needs_key and path not in WITHOUT_KEY:
            described["security"] = [{"bearer": []}, {"header": []}]
        paths.setdefault(path, {})[method] = described
    keys = {"bearer": {"type": "http", "scheme": "bearer"}}
    header = {"header": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Draftwood", "version": __version__, "description": "One model, with OpenAI's API."},
        "paths": paths,
        "components": {
            "schemas": {**request_schemas(limits), **SCHEMAS},
            "securitySchemes": {**keys, **header} if needs_key else {},
        },
    }


def _operation(path: str, summary: str, request: str | None, answer: str, streams: bool) -> Json:
    content: Json = {"application/json": {"schema": _ref(answer)}} if answer else {}
    if path == "/openapi.json":
        content = {"application/json": {"schema": OBJECT}}
    elif path == "/metrics":
        content = {kind: {"schema": TEXT} for kind in ("text/plain", "application/openmetrics-text")}
    elif streams:
        content["text/event-stream"] = {"schema": TEXT}
    failure = {"description": "An error", "content": {"application/json": {"schema": _ref("Error")}}}
    found: Json = {
        "summary": summary,
        "responses": {"200": {"description": "The result", "content": content}, "4XX": failure, "5XX": failure},
    }
    if path == "/health":
        found["responses"]["503"] = {"description": "It cannot generate", "content": content}
    if request is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    if "{name}" in path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return found
