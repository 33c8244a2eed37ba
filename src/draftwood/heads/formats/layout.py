"""The contract of a checkpoint layout: how to recognise it, its config.json, and its names of tensors.

A head's own tensor names are those of its module. A layout maps each to its names in a file. ``map_state`` compares the
two for all layouts, and finds what is missing, unknown or of the wrong shape.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from draftwood.errors import ModelError
from draftwood.heads.build import build_head
from draftwood.heads.config import HeadConfig
from draftwood.models import ModelConfig

Json = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


class Export(NamedTuple):
    """What a file stores about a head in addition to its configuration."""

    dtype: str
    architecture: str  # of the target; empty: not known


class Layout(ABC):
    """One way to store a head in a folder."""

    name: str
    kinds: tuple[str, ...]  # the kinds of heads it can hold
    weights = "model.safetensors"  # the file it writes
    derived: frozenset[str] = frozenset()  # own tensors that are computed from others and may be missing

    @abstractmethod
    def recognises(self, content: Json, names: set[str]) -> bool:
        """Whether a folder with this config.json and these tensors has this layout."""

    @abstractmethod
    def read_config(self, content: Json, shapes: Shapes, model: ModelConfig | None) -> HeadConfig:
        """Read the head's configuration. ``shapes`` are those of the file's tensors, under this layout's names.

        ``model`` is the target's configuration, for fields that a layout does not store.
        """

    @abstractmethod
    def write_config(self, config: HeadConfig, export: Export) -> Json:
        """The config.json of this head."""

    @abstractmethod
    def objections(self, config: HeadConfig) -> list[str]:
        """The reasons why this layout cannot express the head; empty if it can."""

    def normalize_name(self, name: str) -> str:
        """Map a name in a file to this layout's usual name, where files differ."""
        return name

    def stored_names(self, own: str, config: HeadConfig) -> tuple[str, ...]:
        """The names of a module's tensor in a file. If there are several, all hold the same values."""
        return (own,)

    def ignored_shapes(self, config: HeadConfig) -> Shapes:
        """Shapes of tensors that a file may hold and that are ignored, such as copies of the target's."""
        return {}


def state_shapes(config: HeadConfig) -> Shapes:
    """The shapes of the head's tensors by their own names."""
    head = build_head(config, device="meta")
    return {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}


def map_state(layout: Layout, config: HeadConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a file by the head's own names. Raises one error that lists everything that does not fit."""
    state, wrong = {}, []
    ignored, missing, unknown = layout.ignored_shapes(config), [], set(tensors)
    for own, shape in state_shapes(config).items():
        names = layout.stored_names(own, config)
        unknown -= set(names)
        found = [name for name in names if name in tensors]
        if own not in layout.derived or found:
            missing += [name for name in names if name not in tensors]
        wrong += [_find_misfit(name, tensors[name], shape) for name in found]
        if found:
            state[own] = tensors[found[0]]
            wrong += [f"{name} differs from {names[0]}, its copy" for name in _find_different(names, tensors)]
    wrong += [_find_misfit(name, tensors[name], shape) for name, shape in ignored.items() if name in tensors]
    unknown -= set(ignored)
    raise_problems({"missing": sorted(missing), "unknown": sorted(unknown), "wrong": [text for text in wrong if text]})
    return state


def raise_problems(problems: Mapping[str, list[str]]) -> None:
    """Raise one error that lists all problems, if there are any."""
    if any(problems.values()):
        raise ModelError(
            "The tensors do not fit the head that config.json describes",
            got="; ".join(f"{label}: {', '.join(found)}" for label, found in problems.items() if found),
            next_step="Download the head again, or correct its config.json.",
        )


def matrix_shape(shapes: Shapes, name: str) -> tuple[int, int]:
    """Rows and columns of a matrix of the file, for layouts whose config.json does not state sizes."""
    raise_problems({"missing": [] if name in shapes else [name]})
    shape = shapes[name]
    raise_problems({"wrong": [] if len(shape) == 2 else [f"{name} is {list(shape)} and must be a matrix"]})
    return shape[0], shape[1]


def _find_misfit(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> str:
    got = tuple(tensor.shape)
    return "" if got == shape else f"{name} is {list(got)} and must be {list(shape)}"


def _find_different(names: tuple[str, ...], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names whose tensors have the shape of the first one but other values."""
    first = tensors.get(names[0])
    if first is None:
        return []
    same_shape = [name for name in names[1:] if name in tensors and tensors[name].shape == first.shape]
    return [name for name in same_shape if not torch.equal(tensors[name], first)]
