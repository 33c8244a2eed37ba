"""Configuration of a training run: a TOML file with one table per section, and overrides from the command line.

    [data]
    folder = "my-data"

    [method]
    name = "hass"            # all other keys are options of the method

    [run]
    out = "runs/my-head"

Unknown keys and invalid values are errors. The resolved configuration is saved in the folder of the run.
"""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from draftwood.config import DEFAULT_MODEL, MAX_BUDGET, TARGETS, one_of, parse_value
from draftwood.disk import read_toml
from draftwood.errors import OptionError
from draftwood.growth.neural import GROWTHS
from draftwood.heads import GROWS, HeadConfig
from draftwood.train.methods import METHODS

DTYPES = ("auto", "float32", "bfloat16")
STRATEGIES = ("ddp", "fsdp")
TENSORBOARD = ("auto", "on", "off")
CONFIGURATION = "configuration"  # name of the file in error messages

_CHECKS: dict[Any, tuple[str, Callable[[Any], bool]]] = {  # by type: description and check
    int: ("an integer", lambda value: type(value) is int),
    float: ("a number", lambda value: type(value) in (int, float)),
    bool: ("true or false", lambda value: type(value) is bool),
    str: ("a string", lambda value: type(value) is str),
    tuple[int, ...]: (
        "a list of integers",
        lambda value: isinstance(value, (list, tuple)) and all(type(each) is int for each in value),
    ),
}
# Keys of head.changes: fields of HeadConfig that neither follow from the target nor have an option of their own.
_NOT_CHANGEABLE = {"kind", "vocab_size", "draft_vocab_size", "rope"}
SHAPE_KEYS = {
    each.name: _CHECKS[each.type]
    for each in fields(HeadConfig)
    if each.name not in _NOT_CHANGEABLE and not each.name.startswith("target_")
}
SHAPE_KEYS["prefix"] = _CHECKS[bool]  # argument of default_head_config


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection:
    """The target model."""

    name: str = DEFAULT_MODEL  # model name, folder or hub id
    target: str = "auto"  # decoder that runs the model
    device: str = "auto"  # torch device
    cache_tokens: int = 0  # KV cache capacity in tokens; 0: default

    def __post_init__(self) -> None:
        _check_strings("model", self, "name", "device")
        one_of("model.target", self.target, TARGETS)
        _check_integers("model", self, 0, "cache_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """Training data made by `draftwood train data`."""

    folder: Any  # data folder, or a list of folders
    held_out: float = 64  # prompts held out for validation: a number, or a fraction such as 0.05
    max_length: int = 2048  # longer texts are truncated to this many tokens

    def __post_init__(self) -> None:
        if not self.folders or not all(isinstance(folder, str) and folder for folder in self.folders):
            _refuse("data.folder", self.folder, 'the --out folder of draftwood train data, or a list: ["one", "two"]')
        _check_integers("data", self, 8, "max_length")
        share = type(self.held_out) is float and 0.0 < self.held_out < 1.0
        if not share and (type(self.held_out) is not int or self.held_out < 0):
            _refuse("data.held_out", self.held_out, "an integer, or a fraction between 0 and 1")

    @property
    def folders(self) -> tuple[str, ...]:
        return tuple(self.folder) if isinstance(self.folder, (list, tuple)) else (self.folder,)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSection:
    """The draft head: a new one of the default shape, or an existing one to start from."""

    kind: str = ""  # eagle, eagle3, medusa or hydra; empty: the kind that the method trains
    draft_vocab_size: int = 0  # EAGLE-3: size of the draft vocabulary (the most frequent tokens); 0: all tokens
    start: str = ""  # folder or name of a head to start from, which sets the shape
    changes: Mapping[str, Any] = field(default_factory=dict)  # changes to the shape, such as num_layers = 2

    def __post_init__(self) -> None:
        _check_strings("head", self, "kind", "start", empty=True)
        _check_integers("head", self, 0, "draft_vocab_size")
        _check_type("head.changes", self.changes, Mapping, "a table, for example head.changes.num_layers = 2")
        _check_keys(self.changes, sorted(SHAPE_KEYS), "head.changes", "key")
        for name, value in self.changes.items():
            allowed, fits = SHAPE_KEYS[name]
            if not fits(value):
                _refuse(f"head.changes.{name}", value, allowed)
        fixed = [f"head.changes.{name}" for name in self.changes if name not in GROWS]
        fixed += ["head.draft_vocab_size"] if self.draft_vocab_size else []
        if self.start and fixed:
            raise OptionError(
                "head.start already sets the shape of the head",
                got=f"head.start with {', '.join(fixed)}",
                allowed=f"changes of {' and '.join(GROWS)}",
                next_step="Leave one of them out.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSection:
    """The training method and its options."""

    name: str = ""  # training method
    options: Mapping[str, Any] = field(default_factory=dict)  # all other keys of the table

    def __post_init__(self) -> None:
        one_of("method.name", self.name, tuple(METHODS))


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimSection:
    """AdamW with linear warm-up and cosine decay. Set exactly one of steps, epochs and minutes."""

    lr: float = 1e-4  # peak learning rate
    lr_end: float = 0.0  # final learning rate as a fraction of lr
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW betas
    weight_decay: float = 0.0  # AdamW weight decay of matrices
    warmup_steps: int = 100  # steps of linear warm-up
    steps: int = 0  # length of the run in optimiser steps
    epochs: int = 0  # length of the run in epochs
    minutes: float = 0.0  # length of the run in minutes; the schedule then follows the clock; one process only
    clip: float = 0.5  # maximum norm of all gradients; 0: no clipping
    accumulate: int = 1  # micro-batches per optimiser step and process
    ema: float = 0.0  # decay of an exponential moving average of the weights, which is validated and saved; 0: off

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", _check_betas("optim.betas", self.betas))
        for name, low, high in (
            ("lr", 0.0, 1.0),
            ("lr_end", 0.0, 1.0),
            ("weight_decay", 0.0, 1.0),
            ("clip", 0.0, 1e9),
            ("ema", 0.0, 0.999999),
            ("minutes", 0.0, 1e6),
        ):
            object.__setattr__(self, name, _check_number("optim", self, name, low, high))
        _check_integers("optim", self, 0, "warmup_steps", "steps", "epochs")
        _check_integers("optim", self, 1, "accumulate")
        if sum(map(bool, (self.steps, self.epochs, self.minutes))) != 1:
            raise OptionError(
                "The length of a run is a number of steps, epochs or minutes",
                got=f"optim.steps = {self.steps}, optim.epochs = {self.epochs}, optim.minutes = {self.minutes:g}",
                next_step="Set exactly one of the three.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidateSection:
    """Validation on held-out texts."""

    texts: int = 64  # texts for the validation loss
    prompts: int = 16  # prompts answered with draft trees to measure tau; 0: none
    max_tokens: int = 128  # maximum tokens per answer
    budget: int = 60  # nodes per draft tree, including the root
    growths: tuple[str, ...] = ("beam", "optimal", "salf")  # tree growth policies to measure
    positions: int = 8  # positions per text for accuracy and calibration by rank; 0: none

    def __post_init__(self) -> None:
        _check_integers("validate", self, 0, "prompts", "positions")
        _check_integers("validate", self, 1, "texts", "max_tokens")
        _check_integers("validate", self, 2, "budget", high=MAX_BUDGET)
        _check_type("validate.growths", self.growths, (list, tuple), '["beam", "salf"]')
        for growth in self.growths:
            one_of("validate.growths", growth, GROWTHS)
        object.__setattr__(self, "growths", tuple(self.growths))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSection:
    """Output folder, batch size, logging and processes of a run."""

    out: str  # output folder
    seed: int = 0  # random seed
    dtype: str = "auto"  # of the target and the head's matmuls: bfloat16 on a GPU; weights of the head stay float32
    max_tokens: int = 4096  # tokens per micro-batch, including padding
    log_every: int = 10  # steps between lines on the console
    checkpoint_every: int = 500  # steps between checkpoints
    validate_every: int = 0  # steps between validations; 0: only at the end
    keep: int = 2  # number of recent checkpoints to keep, besides the best head
    checkpointing: bool = False  # activation checkpointing: less memory, slower
    cache_signals: str = ""  # folder that caches the target's hidden states; empty: compute them in every epoch
    strategy: str = "ddp"  # of several processes: ddp replicates the head, fsdp shards it
    tensorboard: str = "auto"  # write TensorBoard logs: on, off, or auto (if installed)

    def __post_init__(self) -> None:
        _check_strings("run", self, "out")
        _check_strings("run", self, "cache_signals", empty=True)
        _check_integers("run", self, 0, "seed", "validate_every")
        _check_integers("run", self, 1, "log_every", "checkpoint_every", "keep")
        _check_integers("run", self, 8, "max_tokens")
        one_of("run.dtype", self.dtype, DTYPES)
        one_of("run.strategy", self.strategy, STRATEGIES)
        one_of("run.tensorboard", self.tensorboard, TENSORBOARD)
        _check_type("run.checkpointing", self.checkpointing, bool, "true or false")


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
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Build from tables by name."""
        _check_keys(content, tuple(SECTIONS), "A configuration", "table")
        return cls(**{name: _build_section(name, content.get(name, {})) for name in SECTIONS})

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return the tables as plain values, as in a file."""
        tables = {name: asdict(getattr(self, name)) for name in SECTIONS}
        tables["method"] |= tables["method"].pop("options")
        return tables


def load_config(path: str | Path | None, overrides: Sequence[str] = (), method: str = "") -> TrainConfig:
    """Read the file, if any, and apply overrides such as ``optim.lr=3e-5``. ``method`` sets or checks method.name."""
    content = {} if path is None else read_toml(Path(path), CONFIGURATION)
    for name, table in content.items():
        if not isinstance(table, dict):
            _refuse(name, table, f"tables: {', '.join(f'[{known}]' for known in SECTIONS)}")
    for text in overrides:
        _apply_override(content, text)
    named = content.setdefault("method", {})
    if method and named.setdefault("name", method) != method:
        raise OptionError("The configuration is for another method", got=f"{named['name']}, expected {method}")
    return TrainConfig.of(content)


def write_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Format tables of plain values and of tables. Omit values that are None."""
    lines: list[str] = []
    for name, content in tables.items():
        table = {key: value for key, value in content.items() if value is not None}
        inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
        lines += [f"[{name}]", *(f"{k} = {format_value(v)}" for k, v in table.items() if k not in inner), ""]
        for key, values in inner.items():
            lines += [f"[{name}.{key}]", *(f"{k} = {format_value(v)}" for k, v in values.items()), ""] if values else []
    return "\n".join(lines)


def format_value(value: Any) -> str:
    """Format a plain value as TOML."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, float):
        text = repr(value)
        return text if any(mark in text for mark in ".en") else f"{text}.0"
    return json.dumps(value, ensure_ascii=False)  # strings, integers and booleans are the same in TOML


def _apply_override(content: dict[str, Any], text: str) -> None:
    place, equals, value = text.partition("=")
    section, *keys = place.strip().split(".")
    if not equals or not keys or not all(keys) or len(keys) > 2:
        allowed = "for example optim.lr=3e-5"
        raise OptionError("An override must have the form SECTION.KEY=VALUE", got=repr(text), allowed=allowed)
    if section not in SECTIONS:
        raise OptionError("The configuration has no such table", got=repr(section), allowed=SECTIONS)
    table = content.setdefault(section, {})
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            _refuse(f"{section}.{key}", table, "a table")
    table[keys[-1]] = _parse_override(value.strip())


def _parse_override(text: str) -> Any:
    """Parse as TOML (lists, quoted strings) if possible, else like other command-line values."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return parse_value(text)


def _build_section(name: str, values: Mapping[str, Any]) -> Any:
    cls = SECTIONS[name]
    if name == "method":
        own = {key: value for key, value in values.items() if key != "name"}
        return cls(name=values.get("name", ""), options=own)
    _check_keys(values, [f.name for f in fields(cls)], f"[{name}]", "key")
    needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    missing = [f"{name}.{key}" for key in needed if key not in values]
    if missing:
        next_step = f"Add {missing[0]}=FOLDER, or set it in the table [{name}] of the configuration."
        raise OptionError(f"Required: {', '.join(missing)}", got="nothing", next_step=next_step)
    return cls(**values)


def _check_keys(values: Mapping[str, Any], known: Sequence[str], where: str, what: str) -> None:
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise OptionError(f"{where} has no {what} {', '.join(map(repr, unknown))}", allowed=known)


def _check_strings(section: str, record: Any, *names: str, empty: bool = False) -> None:
    for name in names:
        value = getattr(record, name)
        if not isinstance(value, str) or not (value or empty):
            _refuse(f"{section}.{name}", value, "a string")


def _check_integers(section: str, record: Any, low: int, *names: str, high: int | None = None) -> None:
    for name in names:
        value = getattr(record, name)
        if type(value) is not int or value < low or (high is not None and value > high):
            _refuse(f"{section}.{name}", value, f"an integer, {low} {'or more' if high is None else f'to {high}'}")


def _check_number(section: str, record: Any, name: str, low: float, high: float) -> float:
    value = getattr(record, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        _refuse(f"{section}.{name}", value, f"{low:g} to {high:g}")
    return float(value)


def _check_betas(place: str, value: Any) -> tuple[float, float]:
    fits = isinstance(value, (tuple, list)) and len(value) == 2
    if not fits or not all(type(each) in (int, float) and 0.0 <= each < 1.0 for each in value):
        _refuse(place, value, "two numbers from 0 to below 1, as in [0.9, 0.95]")
    return float(value[0]), float(value[1])


def _check_type(place: str, value: object, kind: Any, allowed: str) -> None:
    if not isinstance(value, kind):
        _refuse(place, value, allowed)


def _refuse(place: str, value: object, allowed: str) -> None:
    raise OptionError(f"{place} has an invalid value", got=repr(value), allowed=allowed)
