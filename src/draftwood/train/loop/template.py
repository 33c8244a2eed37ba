"""The configuration of a training run as a commented TOML file: every key with its default and its meaning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

from draftwood.config import field_meanings
from draftwood.train.config import SECTIONS, format_value
from draftwood.train.methods import METHODS, method_class

_EXAMPLES = {"data.folder": "data", "run.out": "runs/my-head", "optim.epochs": 2}  # required: no defaults
_ANY_METHOD = "eagle3"


def write_template(method: str = "") -> str:
    """Keys with a default are commented out: the file is valid as it is, once the required keys are set."""
    lines = [
        "# Configuration of: draftwood train head --config FILE",
        "# Keys behind '#' have the values shown. On the command line: optim.lr=3e-5",
        "",
    ]
    for name, section in SECTIONS.items():
        about = (section.__doc__ or "").strip().split("\n")[0]
        lines += [f"# {about}", f"[{name}]"]
        lines += _method_lines(method) if name == "method" else _section_lines(name, section)
        lines.append("")
    return "\n".join(lines)


def _section_lines(name: str, section: type[Any]) -> Iterator[str]:
    meanings = field_meanings(section)
    for each in fields(section):
        key = f"{name}.{each.name}"
        if key in _EXAMPLES:
            yield _line(each.name, _EXAMPLES[key], f"required: {meanings[each.name]}")
        elif each.default is MISSING:
            yield f"# {each.name} = {{}}  # {meanings[each.name]}"
        else:
            yield _line(each.name, each.default, meanings[each.name], is_default=True)


def _method_lines(method: str) -> Iterator[str]:
    chosen = method or _ANY_METHOD
    yield _line("name", chosen, f"training method: {', '.join(METHODS)}")
    options = method_class(chosen).Options
    meanings = field_meanings(options)
    for each in fields(options):
        yield _line(each.name, _default(each), meanings.get(each.name, ""), is_default=True)


def _default(each: Field[Any]) -> Any:
    return each.default if each.default is not MISSING else {}


def _line(key: str, value: Any, meaning: str, *, is_default: bool = False) -> str:
    shown = "{}" if value == {} else format_value(value)
    return f"{'# ' if is_default else ''}{key} = {shown}{f'  # {meaning}' if meaning else ''}"
