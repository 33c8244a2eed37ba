"""Public options: frozen, keyword-only, checked when they are created. The one place with defaults."""

import inspect
import json
import os
import re
from collections.abc import ItemsView, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from draftwood.errors import OptionError

T = TypeVar("T")


DEFAULT_MODEL = "smollm2"
DEFAULT_MEMORY = "prompt"  # the samples of one prompt share what the drafter learns
DEFAULT_DRAFTER = "blend"
DTYPES = ("auto", "float32", "bfloat16", "float16")
GPU_FORMATS = ("fp8", "int8")  # weights in 8 bits with one scale per output
CPU_FORMATS = ("q8_0", "q4_0", "q4_k")  # weights in the blocks of GGUF files
QUANTIZE = (*GPU_FORMATS, *CPU_FORMATS)
TARGETS = ("auto", "native", "hf", "hf-plain")
MAX_BUDGET = 1024
PREFILL_CHUNK = 512
# Far beyond all that makes sense, and far from what would overflow float32.
MAX_TEMPERATURE = 1000.0
MAX_PENALTY = 1000.0
MAX_STRUCTURED = 1 << 18  # characters of a schema, a regular expression or a grammar
_WORDS = {"none": None, "true": True, "false": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Structured:
    """What the output must match: one of a JSON schema, a regular expression and a grammar."""

    json_schema: str | Mapping[str, Any] | type | None = None  # JSON text, an object, or a class of pydantic
    regex: str | None = None  # syntax of Rust's regular expressions; matches the whole output
    grammar: str | None = None  # syntax of Lark, as llguidance extends it
    strict: bool = True  # False: ignore keywords of a schema that are not supported, instead of refusing it

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("json_schema", "regex", "grammar")}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            got = ", ".join(given) or "nothing"
            allowed = "one of json_schema, regex and grammar"
            raise OptionError("structured must say what to match, once", got=got, allowed=allowed, param="structured")
        ((name, value),) = given.items()
        text = _schema_text(value) if name == "json_schema" else value
        if not isinstance(text, str):
            raise OptionError(f"{name} must be text", got=type(value).__name__, param="structured")
        if not text.isascii() and not _is_unicode(text):
            raise OptionError(f"{name} is not valid Unicode", got=ascii(text)[:80], param="structured")
        if len(text) > MAX_STRUCTURED:
            got, allowed = f"{len(text)} characters", f"at most {MAX_STRUCTURED}"
            raise OptionError(f"{name} is too long", got=got, allowed=allowed, param="structured")
        object.__setattr__(self, name, text)

    @property
    def kind(self) -> str:
        return "json_schema" if self.json_schema is not None else "regex" if self.regex is not None else "grammar"

    @property
    def text(self) -> str:
        """The schema as JSON, the regular expression or the grammar."""
        return str(getattr(self, self.kind))


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it ends. Temperature 0 is greedy."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output, 1: off
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None  # alternatives per token; 0: only the token's own
    structured: Structured | None = None  # what the output must match
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()  # added to logits, by token id

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        whole("max_tokens", self.max_tokens, 1)
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        whole("top_k", self.top_k, 0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 1 / MAX_PENALTY, MAX_PENALTY)
        _number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        whole("n", self.n, 1)
        if self.seed is not None:
            whole("seed", self.seed, 0)
        if self.logprobs is not None:
            whole("logprobs", self.logprobs, 0)
        if self.structured is not None and not isinstance(self.structured, Structured):
            raise OptionError(
                "structured must say what the output must match",
                got=type(self.structured).__name__,
                allowed="Structured(json_schema=...), Structured(regex=...) or Structured(grammar=...)",
                param="structured",
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether logits are changed before temperature and filters."""
        penalties = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return penalties or self.repetition_penalty != 1.0 or bool(self.logit_bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Which model is loaded, and how it runs."""

    model: str | os.PathLike[str] = DEFAULT_MODEL  # a known name, a folder, a GGUF file or a hub id
    dtype: str = "auto"  # auto, float32, bfloat16 or float16
    quantize: str | None = None  # fp8, int8 on a GPU; q8_0, q4_0, q4_k on a CPU: smaller weights, a different model
    exact: bool = False  # on a GPU: the same bits for a token in every pass, so outputs equal plain decoding; slower
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...
    target: str = "auto"  # native: own decoders; hf: transformers; hf-plain: also models that cannot run trees
    max_batch: int = 8  # sequences that run together
    cache_tokens: int | None = None  # KV cache capacity; None: what max_batch full contexts need, at most 65,536

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("target", self.target, TARGETS)
        if self.quantize is not None:
            one_of("quantize", self.quantize, QUANTIZE)
        whole("max_batch", self.max_batch, 1)
        if self.cache_tokens is not None:
            whole("cache_tokens", self.cache_tokens, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How requests share one target."""

    budget: int | str = "auto"  # positions per verification pass and sequence, the root included
    max_batch: int = 8  # sequences that run together
    prefill_chunk: int = PREFILL_CHUNK  # prompt positions per pass

    def __post_init__(self) -> None:
        _budget(self.budget)
        whole("max_batch", self.max_batch, 1)
        whole("prefill_chunk", self.prefill_chunk, 1)


def from_mapping(cls: type[T], values: Mapping[str, Any], what: str) -> T:
    """Builds the options record ``cls``; raises OptionError for unknown keys."""
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise OptionError(f"{what} has no option {', '.join(map(repr, unknown))}", allowed=known or "no options")
    try:
        return cls(**values)
    except TypeError as error:
        raise OptionError(f"{what} was given options it cannot use", got=dict(values)) from error


def field_meanings(cls: type[Any]) -> dict[str, str]:
    """The meaning of each field of a record: the comment after it, the lines above it, or the string below it.

    Empty if the source is not there, as in a frozen program.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        if "__dataclass_fields__" not in vars(base):
            continue
        name, above = "", ""
        for line in _source_of(base).splitlines():
            if match := re.match(r"    (\w+): [^#]*(?:#\s*(.*))?$", line):
                name = match[1]
                found[name] = match[2] or above or found.get(name, "")
                above = ""
            elif match := re.match(r"    #\s*(.*)", line):
                above = f"{above} {match[1]}".strip()
            elif name and (match := re.match(r'    """(.*)"""$|        [^#]*#\s*(.*)', line)):
                found[name] = found[name] or match[1] or match[2]
            elif re.match(r"    (def|@)", line):
                break
    return found


def _source_of(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


def parse_value(text: str) -> Any:
    """A whole number, a number, true, false, none, or the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise OptionError(f"{name} is unknown", got=repr(value), allowed=allowed, param=name)
    return value


def whole(name: str, value: object, low: int, high: int | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        span = f"{low} or more" if high is None else f"{low} to {high}"
        raise OptionError(f"{name} must be a whole number", got=repr(value), allowed=span, param=name)
    return value


def _budget(budget: object) -> None:
    is_whole = isinstance(budget, int) and not isinstance(budget, bool)
    if budget != "auto" and not (is_whole and 1 <= budget <= MAX_BUDGET):  # type: ignore[operator]
        allowed = f"'auto', or 1 to {MAX_BUDGET} positions"
        raise OptionError(
            "budget must be a number of positions or 'auto'", got=repr(budget), allowed=allowed, param="budget"
        )


def _is_unicode(text: str) -> bool:
    """Whether the text has no half of a surrogate pair, which UTF-8 cannot represent."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _schema_text(schema: object) -> object:
    """A schema as JSON, with its keys in order: it is the order of the output's properties."""
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if not isinstance(schema, Mapping):
        return schema
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError("json_schema cannot be written as JSON", got=error, param="structured") from error


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (tuple, list)) or not all(isinstance(s, str) and s for s in strings):
        raise OptionError("stop must be one or several texts, none of them empty", got=repr(stop), param="stop")
    return tuple(strings)


def _biases(given: object) -> tuple[tuple[int, float], ...]:
    pairs = given.items() if isinstance(given, Mapping) else given
    pairs = tuple(map(tuple, pairs)) if isinstance(pairs, ItemsView | tuple | list) else None
    if pairs is None or not all(
        type(token) is int and token >= 0 and isinstance(bias, int | float) and abs(bias) <= MAX_PENALTY
        for token, bias in pairs
    ):
        allowed = f"numbers from {-MAX_PENALTY:g} to {MAX_PENALTY:g} by token id"
        raise OptionError("logit_bias must be a mapping", got=repr(given)[:80], allowed=allowed, param="logit_bias")
    return pairs


def _stop_token_ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, (tuple, list)) or not all(type(token) is int and token >= 0 for token in ids):
        raise OptionError(
            "stop_token_ids must be a list of token ids",
            got=repr(ids),
            allowed="whole numbers, as in (2, 7)",
            param="stop_token_ids",
        )
    return tuple(ids)


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high  # not nan
    if not ok or (open_low and value == low):
        span = f"{'above ' if open_low else ''}{low:g} to {high:g}"
        raise OptionError(f"{name} is out of range", got=repr(value), allowed=span, param=name)
