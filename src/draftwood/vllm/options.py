"""Options of the proposer: from environment variables and a TOML file, since vLLM passes none."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from draftwood.config import from_mapping, parse_value, whole
from draftwood.disk import read_toml
from draftwood.errors import OptionError

PREFIX = "DRAFTWOOD_VLLM_"
FILE_VARIABLE = f"{PREFIX}CONFIG"


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmOptions:
    min_chance: float | str = "auto"  # guess a token only if its chance of acceptance is at least this
    memory_tokens: int = 1_000_000  # tokens of other answers that are searched; 0: each request sees its own text only
    datastore: str | None = None  # a file of `draftwood datastore`, read into that memory at the start

    def __post_init__(self) -> None:
        chance = self.min_chance
        is_number = isinstance(chance, (int, float)) and not isinstance(chance, bool)
        if chance != "auto" and not (is_number and 0.0 <= float(chance) <= 1.0):
            raise OptionError("min_chance must be a chance", got=repr(chance), allowed="'auto', or 0 to 1")
        whole("memory_tokens", self.memory_tokens, 0, 1 << 30)
        if self.datastore is not None and not self.memory_tokens:
            raise OptionError(
                "A datastore needs memory", got="memory_tokens = 0", next_step="Set memory_tokens to 1 or more."
            )


def read_options(environment: Mapping[str, str] | None = None) -> VllmOptions:
    """Read ``DRAFTWOOD_VLLM_...`` variables; they take precedence over the file that ``..._CONFIG`` names."""
    given = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    if path := given.get(FILE_VARIABLE):
        values |= read_toml(Path(path).expanduser(), "file of options for vLLM")
    known = {f"{PREFIX}{field.name.upper()}": field.name for field in fields(VllmOptions)}
    for variable, text in given.items():
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE:
            continue
        if variable not in known:
            raise OptionError(f"Unknown environment variable {variable}", allowed=[*known, FILE_VARIABLE])
        name = known[variable]
        values[name] = text if name == "datastore" else parse_value(text)
    return from_mapping(VllmOptions, values, "the proposer for vLLM")
