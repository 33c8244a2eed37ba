"""The fields of requests, by API: which are known, which are ignored, and which are refused.

A known field that would change the output and is not supported is refused. A field that cannot change it is ignored,
and so are unknown fields, with a warning.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from draftwood.errors import did_you_mean
from draftwood.serve.errors import MAX_PARAM, ApiError, shorten

Fields = Mapping[str, Any]

MAX_IGNORED = 8  # unknown fields that a warning names

# Names as in SamplingParams. The first line is in OpenAI's API too.
SAMPLING_FIELDS = {
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "n", "stop", "logit_bias",
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos",
}  # fmt: skip
COMMON_FIELDS = {
    "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "logprobs", "prediction", "drafter",
    "budget", "response_format", "regex", "grammar",
}  # fmt: skip
TOOL_FIELDS = {"tools", "tool_choice", "parallel_tool_calls"}
EXTENSIONS = {  # of ours, in APIs that have no such field
    "seed", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop_token_ids", "ignore_eos",
    "logit_bias", "prediction", "drafter", "budget", "regex", "grammar",
}  # fmt: skip
IGNORED_FIELDS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "moderation",
    "function_call", "verbosity", "reasoning_effort",
}  # fmt: skip
# Unsupported fields, with the values that are accepted because they have no effect.
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "functions": ([],), "modalities": (["text"],), "audio": (), "web_search_options": (),
    "suffix": ("",), "best_of": (1,),
}  # fmt: skip


class ApiFields(NamedTuple):
    known: set[str]
    ignored: set[str]
    unsupported: Mapping[str, tuple[Any, ...]]  # with the values that have no effect


CHAT = ApiFields(
    SAMPLING_FIELDS | COMMON_FIELDS | TOOL_FIELDS | {"messages", "top_logprobs", "reasoning_format"},
    IGNORED_FIELDS,
    {**UNSUPPORTED_FIELDS, "echo": (False,)},
)
COMPLETIONS = ApiFields(
    SAMPLING_FIELDS | COMMON_FIELDS | {"prompt", "echo"},
    IGNORED_FIELDS | TOOL_FIELDS - {"tools"},
    {**UNSUPPORTED_FIELDS, "tools": ([],)},
)
RESPONSES = ApiFields(
    EXTENSIONS
    | {
        "model",
        "input",
        "instructions",
        "stream",
        "max_output_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "text",
        *TOOL_FIELDS,
    },
    IGNORED_FIELDS | {"stream_options", "include", "reasoning", "max_tool_calls"},
    {
        "background": (False,),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
    },
)
MESSAGES = ApiFields(
    EXTENSIONS
    | {"model", "messages", "system", "stream", "max_tokens", "stop_sequences", "temperature", "top_p", "top_k"}
    | {"tools", "tool_choice"},
    {"metadata", "service_tier", "thinking", "cache_control", "context_management", "output_config"},
    {"mcp_servers": ([],), "container": ()},
)


def check_fields(fields: Fields, api: ApiFields, strict: bool) -> tuple[str, ...]:
    """Return the names of unknown fields, unless they are an error."""
    unknown = []
    for name, value in fields.items():
        if name in api.unsupported:
            if value is not None and value not in api.unsupported[name]:
                raise ApiError(f"{name} is not supported", param=name, code="unsupported_parameter")
        elif name not in api.known and name not in api.ignored:
            unknown.append(shorten(name, MAX_PARAM))
            if strict:
                guess = did_you_mean(unknown[0], api.known)
                what = f"Unknown field {unknown[0]!r}"
                raise ApiError(what, next_step=guess, param=unknown[0], code="unknown_parameter")
    return tuple(unknown[:MAX_IGNORED])
