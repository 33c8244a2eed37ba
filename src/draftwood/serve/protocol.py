"""What clients ask for: the fields of OpenAI's requests, and a few more, read into what the engine takes.

A field that would change the answer and cannot be obeyed is refused; one that could not change it is let pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from draftwood.config import SamplingParams
from draftwood.errors import OptionError, did_you_mean
from draftwood.serve.http import HttpError

Fields = Mapping[str, Any]
Message = dict[str, str]

# As they are called in SamplingParams too; all but the first line are not OpenAI's.
SAMPLING = {
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "n", "stop",
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos",
}  # fmt: skip
OURS = {"drafter"}
COMMON = {
    "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "logprobs", "prediction",
}  # fmt: skip
CHAT = {"messages", "top_logprobs"}
COMPLETION = {"prompt"}
NO_EFFECT = {  # on what is answered
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "moderation",
    "parallel_tool_calls", "tool_choice", "function_call", "verbosity", "reasoning_effort",
}  # fmt: skip
# Fields that we cannot obey, and the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
}
ROLES = {"developer": "system"}  # that templates know by another name
MOST_TOP_LOGPROBS = 20
COMPLETION_TOKENS = 16  # OpenAI's default
SEEDS = 2**63


class Asked(NamedTuple):
    """A request, read and checked."""

    params: SamplingParams
    stream: bool
    usage_at_end: bool  # of a stream
    drafter: str | None
    prediction: str  # the answer that is expected


def read_model(fields: Fields, served: Sequence[str]) -> None:
    """Refuses another model than the one that is here."""
    model = fields.get("model")
    if not isinstance(model, str):
        raise HttpError(400, f"model is missing\n  allowed: {', '.join(served)}", param="model")
    if model not in served:
        message = f"There is no model {model!r} here\n  allowed: {', '.join(served)}"
        raise HttpError(404, message, param="model", code="model_not_found")


def read_request(fields: Fields, *, chat: bool, context: int, drafters: Sequence[str]) -> Asked:
    """All but the prompt. ``context``: tokens of the model's; ``drafters``: names that may be asked for."""
    _check_names(fields, CHAT if chat else COMPLETION)
    values = {name: fields[name] for name in SAMPLING if fields.get(name) is not None}
    values.setdefault("temperature", 1.0)
    values["max_tokens"] = _most_tokens(fields, context if chat else COMPLETION_TOKENS)
    values["logprobs"] = _chat_logprobs(fields) if chat else _top(fields, "logprobs")
    if type(values.get("seed")) is int:
        values["seed"] %= SEEDS  # OpenAI's may be below 0
    for name in ("stop", "stop_token_ids"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise HttpError(400, "stream_options is no object", param="stream_options")
    drafter = fields.get("drafter")
    if drafter is not None and drafter not in drafters:
        raise HttpError(400, f"There is no drafter {drafter!r}\n  allowed: {', '.join(drafters)}", param="drafter")
    try:
        params = SamplingParams(**values)
    except OptionError as error:
        raise HttpError(400, str(error), param=error.param, code=error.code) from error
    return Asked(params, _flag(fields, "stream"), _flag(options, "include_usage"), drafter, _prediction(fields))


def read_messages(fields: Fields) -> list[Message]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise HttpError(400, "messages must be a list of one message or more", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def read_prompts(fields: Fields) -> list[str | list[int]]:
    """Of a completion: one text or several, one row of token ids or several."""
    prompt = fields.get("prompt")
    prompts = prompt if isinstance(prompt, list) and prompt and not _is_row(prompt) else [prompt]
    if not all((isinstance(each, str) and each) or _is_row(each) for each in prompts):
        raise HttpError(400, "prompt must be a text, token ids, or a list of either; none empty", param="prompt")
    return list(prompts)


def _message(message: object, where: str) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(role, str):
        raise HttpError(400, f"{where} is no object with a role and a content", param=where)
    if message.get("tool_calls") or role in ("tool", "function"):
        raise HttpError(400, "Tools are not supported here", param=where)
    return {"role": ROLES.get(role, role), "content": _content(message.get("content"), where)}


def _content(content: object, where: str) -> str:
    """A text, or the texts of its parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return "".join(part["text"] for part in content)
    raise HttpError(400, "The content of a message is no text\n  allowed: a text, or parts of type text", param=where)


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_row(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _prediction(fields: Fields) -> str:
    prediction = fields.get("prediction")
    if prediction is None:
        return ""
    if not isinstance(prediction, dict) or prediction.get("type") != "content":
        raise HttpError(400, "prediction must be an object with type 'content' and a content", param="prediction")
    return _content(prediction.get("content"), "prediction")


def _check_names(fields: Fields, own: set[str]) -> None:
    known = SAMPLING | OURS | COMMON | own
    for name, value in fields.items():
        if name in REFUSED and value is not None and value not in REFUSED[name]:
            raise HttpError(400, f"{name} is not supported here", param=name, code="unsupported_parameter")
        if name not in known and name not in REFUSED and name not in NO_EFFECT:
            guess = did_you_mean(name, known)
            message = f"There is no field {name!r}" + (f"\n  {guess}" if guess else "")
            raise HttpError(400, message, param=name, code="unknown_parameter")


def _most_tokens(fields: Fields, default: int) -> Any:
    """None is as good as nothing."""
    asked = (fields.get(name) for name in ("max_completion_tokens", "max_tokens"))
    return next((value for value in asked if value is not None), default)


def _chat_logprobs(fields: Fields) -> int | None:
    top = fields.get("top_logprobs")
    if not _flag(fields, "logprobs"):
        if top:
            raise HttpError(400, "top_logprobs wants logprobs to be true", param="top_logprobs")
        return None
    return _top(fields, "top_logprobs") or 0


def _top(fields: Fields, name: str) -> int | None:
    """Alternatives of every token."""
    top = fields.get(name)
    if top is not None and (type(top) is not int or not 0 <= top <= MOST_TOP_LOGPROBS):
        raise HttpError(400, f"{name} must be a whole number, 0 to {MOST_TOP_LOGPROBS}", param=name)
    return top


def _flag(fields: Fields, name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise HttpError(400, f"{name} must be true or false\n  got: {value!r}", param=name)
    return bool(value)
