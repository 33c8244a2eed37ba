"""What a training run is asked to do: a TOML file with a table for each part, read strictly, and changes to it.

    [data]
    folder = "my-data"

    [method]
    name = "hass"            # further keys are the method's own options

    [run]
    out = "runs/my-head"

What is not expected is an error that says what is allowed. The resolved configuration is kept with the run.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from draftwood.config import DEFAULT_MODEL, MAX_BUDGET, TARGETS, one_of, parse_value
from draftwood.disk import read_toml
from draftwood.errors import OptionError
from draftwood.growth.neural import GROWTHS
from draftwood.heads import HeadConfig
from draftwood.train.methods import METHODS

DTYPES = ("auto", "float32", "bfloat16")
STRATEGIES = ("ddp", "fsdp")
TENSORBOARD = ("auto", "on", "off")
CONFIGURATION = "configuration"  # what its file is called in errors

_PLAIN: dict[str, tuple[str, Callable[[Any], bool]]] = {  # by type: what is allowed, and whether a value is that
    "int": ("a whole number", lambda value: type(value) is int),
    "float": ("a number", lambda value: type(value) in (int, float)),
    "bool": ("true or false", lambda value: type(value) is bool),
    "str": ("a text", lambda value: type(value) is str),
    "tuple[int, ...]": (
        "a list of whole numbers",
        lambda value: isinstance(value, (list, tuple)) and all(type(each) is int for each in value),
    ),
}
# What head.changes may have: the fields of HeadConfig that do not follow from the target or are said elsewhere.
_FIXED = {"kind", "vocab_size", "draft_vocab_size", "rope"}
SHAPE = {
    each.name: _PLAIN[str(each.type)]
    for each in fields(HeadConfig)
    if each.name not in _FIXED and not each.name.startswith("target_")
}
SHAPE["prefix"] = _PLAIN["bool"]  # an argument of default_head_config


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection:
    """The target."""

    name: str = DEFAULT_MODEL
    target: str = "auto"  # which decoder runs it
    device: str = "auto"
    cache_tokens: int = 0  # slots of its cache; 0: the usual number

    def __post_init__(self) -> None:
        _texts("model", self, "name", "device")
        one_of("model.target", self.target, TARGETS)
        _whole("model", self, 0, "cache_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """Texts that `draftwood train data` has made."""

    folder: Any  # or several
    held_out: float = 64  # prompts that are validated on and not trained on: a number, or a share as 0.05
    max_length: int = 2048  # tokens of a text that are read; what is behind them is left out

    def __post_init__(self) -> None:
        if not self.folders or not all(isinstance(folder, str) and folder for folder in self.folders):
            _refuse("data.folder", self.folder, 'the --out of draftwood train data, or several: ["one", "two"]')
        _whole("data", self, 8, "max_length")
        share = type(self.held_out) is float and 0.0 < self.held_out < 1.0
        if not share and (type(self.held_out) is not int or self.held_out < 0):
            _refuse("data.held_out", self.held_out, "a whole number, or a share between 0 and 1")

    @property
    def folders(self) -> tuple[str, ...]:
        return tuple(self.folder) if isinstance(self.folder, (list, tuple)) else (self.folder,)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSection:
    """The head: a new one of the usual shape but for ``changes``, or one to start from."""

    kind: str = ""  # empty: the one that the method is for
    draft_vocab_size: int = 0  # EAGLE-3: tokens that it can suggest, the most frequent ones; 0: all
    start: str = ""  # the folder of a head to start from, whose shape it then has
    changes: Mapping[str, Any] = field(default_factory=dict)  # those in SHAPE

    def __post_init__(self) -> None:
        _texts("head", self, "kind", "start", empty=True)
        _whole("head", self, 0, "draft_vocab_size")
        _of_type("head.changes", self.changes, Mapping, "a table, as in head.changes.num_layers = 2")
        _only(self.changes, sorted(SHAPE), "head.changes", "key")
        for name, value in self.changes.items():
            allowed, fits = SHAPE[name]
            if not fits(value):
                _refuse(f"head.changes.{name}", value, allowed)
        if self.start and (self.draft_vocab_size or self.changes):
            raise OptionError(
                "A head that is started from has its shape already",
                got=f"head.start with {'head.changes' if self.changes else 'head.draft_vocab_size'}",
                next_step="Leave one of them out.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSection:
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)  # the other keys of the table: the method's own record

    def __post_init__(self) -> None:
        one_of("method.name", self.name, tuple(METHODS))


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimSection:
    """AdamW with a linear warm-up and a cosine to ``lr * lr_end``."""

    lr: float = 1e-4
    lr_end: float = 0.0  # share of lr that is left at the end
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_steps: int = 100
    steps: int = 0  # 0: as many as the epochs have
    epochs: int = 0  # 0: as many as the steps take
    minutes: float = 0.0  # instead of both: as many steps as fit, in one process; the rate then follows the clock
    clip: float = 0.5  # norm of all gradients together; 0: off
    accumulate: int = 1  # micro-batches of a step, in each process
    ema: float = 0.0  # decay of a running mean of the weights, which is then what is validated and kept; 0: off

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", _pair("optim.betas", self.betas))
        for name, low, high in (
            ("lr", 0.0, 1.0),
            ("lr_end", 0.0, 1.0),
            ("weight_decay", 0.0, 1.0),
            ("clip", 0.0, 1e9),
            ("ema", 0.0, 0.999999),
            ("minutes", 0.0, 1e6),
        ):
            object.__setattr__(self, name, _number("optim", self, name, low, high))
        _whole("optim", self, 0, "warmup_steps", "steps", "epochs")
        _whole("optim", self, 1, "accumulate")
        if sum(map(bool, (self.steps, self.epochs, self.minutes))) != 1:
            raise OptionError(
                "How long to train is said by a number of steps, of epochs or of minutes",
                got=f"optim.steps = {self.steps}, optim.epochs = {self.epochs}, optim.minutes = {self.minutes:g}",
                next_step="Set one of the three.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidateSection:
    """What is measured on texts that were held out."""

    texts: int = 64  # for the loss
    prompts: int = 16  # that are answered with draft trees; 0: none
    max_tokens: int = 128  # of an answer
    budget: int = 60  # nodes of a draft tree
    growths: tuple[str, ...] = ("beam", "optimal", "salf")
    positions: int = 8  # of a text, where the head is conditioned on its n-th ranked token; 0: none

    def __post_init__(self) -> None:
        _whole("validate", self, 0, "prompts", "positions")
        _whole("validate", self, 1, "texts", "max_tokens")
        _whole("validate", self, 2, "budget", high=MAX_BUDGET)
        _of_type("validate.growths", self.growths, (list, tuple), '["beam", "salf"]')
        for growth in self.growths:
            one_of("validate.growths", growth, GROWTHS)
        object.__setattr__(self, "growths", tuple(self.growths))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSection:
    out: str
    seed: int = 0
    dtype: str = "auto"  # of the target and of the head's products: bfloat16 on a GPU; weights of the head are float32
    max_tokens: int = 4096  # of a micro-batch, padding included
    log_every: int = 10
    checkpoint_every: int = 500
    validate_every: int = 0  # steps; 0: only at the end
    keep: int = 2  # the last so many checkpoints, and the best head
    checkpointing: bool = False  # activations are computed again for the gradients: slower, and less memory
    cache_signals: str = ""  # a folder for the target's hidden states; empty: they are computed when they are needed
    strategy: str = "ddp"  # several processes: each has the whole head, or (fsdp) its part
    tensorboard: str = "auto"

    def __post_init__(self) -> None:
        _texts("run", self, "out")
        _texts("run", self, "cache_signals", empty=True)
        _whole("run", self, 0, "seed", "validate_every")
        _whole("run", self, 1, "log_every", "checkpoint_every", "keep")
        _whole("run", self, 8, "max_tokens")
        one_of("run.dtype", self.dtype, DTYPES)
        one_of("run.strategy", self.strategy, STRATEGIES)
        one_of("run.tensorboard", self.tensorboard, TENSORBOARD)
        _of_type("run.checkpointing", self.checkpointing, bool, "true or false")


SECTIONS: dict[str, type[Any]] = {
    "model": ModelSection,
    "data": DataSection,
    "head": HeadSection,
    "method": MethodSection,
    "optim": OptimSection,
    "validate": ValidateSection,
    "run": RunSection,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    model: ModelSection
    data: DataSection
    head: HeadSection
    method: MethodSection
    optim: OptimSection
    validate: ValidateSection
    run: RunSection

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> TrainConfig:
        """From tables by name."""
        _only(content, tuple(SECTIONS), "A configuration", "table")
        return cls(**{name: _section(name, content.get(name, {})) for name in SECTIONS})

    def tables(self) -> dict[str, dict[str, Any]]:
        """Plain values, as a file has them."""
        tables = {name: asdict(getattr(self, name)) for name in SECTIONS}
        tables["method"] |= tables["method"].pop("options")
        return tables


def load_config(path: str | Path | None, overrides: Sequence[str] = (), method: str = "") -> TrainConfig:
    """The file, if there is one, with changes such as ``optim.lr=3e-5``; ``method`` is the name that was asked for."""
    content = {} if path is None else read_toml(Path(path), CONFIGURATION)
    for name, table in content.items():
        if not isinstance(table, dict):
            _refuse(name, table, f"tables: {', '.join(f'[{known}]' for known in SECTIONS)}")
    for text in overrides:
        _change(content, text)
    named = content.setdefault("method", {})
    if method and named.setdefault("name", method) != method:
        raise OptionError("The configuration is for another method", got=f"{named['name']}, asked for: {method}")
    return TrainConfig.of(content)


def write_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of plain values, and of tables of them; what is None is left out."""
    lines: list[str] = []
    for name, content in tables.items():
        table = {key: value for key, value in content.items() if value is not None}
        inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
        lines += [f"[{name}]", *(f"{k} = {_written(v)}" for k, v in table.items() if k not in inner), ""]
        for key, values in inner.items():
            lines += [f"[{name}.{key}]", *(f"{k} = {_written(v)}" for k, v in values.items()), ""] if values else []
    return "\n".join(lines)


def _written(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, float):
        text = repr(value)
        return text if any(mark in text for mark in ".en") else f"{text}.0"
    return json.dumps(value, ensure_ascii=False)  # texts, whole numbers, true and false are written as in TOML


def _change(content: dict[str, Any], text: str) -> None:
    place, equals, value = text.partition("=")
    section, *keys = place.strip().split(".")
    if not equals or not keys or not all(keys) or len(keys) > 2:
        allowed = "SECTION.KEY=VALUE, as in optim.lr=3e-5"
        raise OptionError("A change to the configuration is a place and a value", got=repr(text), allowed=allowed)
    if section not in SECTIONS:
        raise OptionError("The configuration has no such table", got=repr(section), allowed=SECTIONS)
    table = content.setdefault(section, {})
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            _refuse(f"{section}.{key}", table, "a table")
    table[keys[-1]] = _value(value.strip())


def _value(text: str) -> Any:
    """As in TOML where it can be read so (lists, texts in quotes), else as on the rest of the command line."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return parse_value(text)


def _section(name: str, values: Mapping[str, Any]) -> Any:
    cls = SECTIONS[name]
    if name == "method":
        own = {key: value for key, value in values.items() if key != "name"}
        return cls(name=values.get("name", ""), options=own)
    _only(values, [f.name for f in fields(cls)], f"[{name}]", "key")
    needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    missing = [f"{name}.{key}" for key in needed if key not in values]
    if missing:
        next_step = f"Add {missing[0]}=FOLDER, or say it in the table [{name}] of the configuration."
        raise OptionError(f"{' and '.join(missing)} has to be said", got="nothing", next_step=next_step)
    return cls(**values)


def _only(values: Mapping[str, Any], known: Sequence[str], where: str, what: str) -> None:
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise OptionError(f"{where} has no {what} {', '.join(map(repr, unknown))}", allowed=known)


def _texts(section: str, record: Any, *names: str, empty: bool = False) -> None:
    for name in names:
        value = getattr(record, name)
        if not isinstance(value, str) or not (value or empty):
            _refuse(f"{section}.{name}", value, "a text")


def _whole(section: str, record: Any, low: int, *names: str, high: int | None = None) -> None:
    for name in names:
        value = getattr(record, name)
        if type(value) is not int or value < low or (high is not None and value > high):
            _refuse(f"{section}.{name}", value, f"a whole number, {low} {'or more' if high is None else f'to {high}'}")


def _number(section: str, record: Any, name: str, low: float, high: float) -> float:
    value = getattr(record, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        _refuse(f"{section}.{name}", value, f"{low:g} to {high:g}")
    return float(value)


def _pair(place: str, value: Any) -> tuple[float, float]:
    fits = isinstance(value, (tuple, list)) and len(value) == 2
    if not fits or not all(type(each) in (int, float) and 0.0 <= each < 1.0 for each in value):
        _refuse(place, value, "two numbers from 0 to below 1, as in [0.9, 0.95]")
    return float(value[0]), float(value[1])


def _of_type(place: str, value: object, kind: Any, allowed: str) -> None:
    if not isinstance(value, kind):
        _refuse(place, value, allowed)


def _refuse(place: str, value: object, allowed: str) -> None:
    raise OptionError(f"{place} has a value that makes no sense", got=repr(value), allowed=allowed)
