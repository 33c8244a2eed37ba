"""What a layout of checkpoints is: how to tell it, what its config.json means, and how it names the tensors.

A head's own names are those of its module. A layout says where each lies in a file; whatever is missing there, unknown
or of the wrong shape is found by comparing the two, for all layouts in one place.
"""

from __future__ import annotations

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
    """What a file says of a head beside its configuration."""

    dtype: str
    architecture: str  # of the target, empty: not known


class Layout(ABC):
    """One way to lay a head down in a folder."""

    name: str
    kinds: tuple[str, ...]  # the kinds of heads it can hold
    weights = "model.safetensors"  # the file it writes
    derived: frozenset[str] = frozenset()  # own tensors that follow from others and may be left out

    @abstractmethod
    def recognises(self, content: Json, names: set[str]) -> bool:
        """Whether a folder with this config.json and these tensors is laid out so."""

    @abstractmethod
    def read_config(self, content: Json, shapes: Shapes, model: ModelConfig | None) -> HeadConfig:
        """The head's configuration; ``shapes`` are those of the file, under this layout's names.

        ``model`` is the target's configuration, for what a layout leaves to it.
        """

    @abstractmethod
    def write_config(self, config: HeadConfig, export: Export) -> Json:
        """The config.json of this head."""

    @abstractmethod
    def objections(self, config: HeadConfig) -> list[str]:
        """What of the head this layout has no place for."""

    def spelled(self, name: str) -> str:
        """A name as this layout spells it, where files may spell it otherwise."""
        return name

    def places(self, own: str, config: HeadConfig) -> tuple[str, ...]:
        """The names under which a tensor lies in a file, given the name in the module. Several hold the same values."""
        return (own,)

    def ignored(self, config: HeadConfig) -> Shapes:
        """Tensors that a file may hold and that are not the head's: copies of something of the target."""
        return {}


def state_shapes(config: HeadConfig) -> Shapes:
    """Every tensor of the head by its own name."""
    head = build_head(config, device="meta")
    return {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}


def state_from(layout: Layout, config: HeadConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a file by the head's own names; one error for all that does not fit."""
    state, wrong = {}, []
    ignored, missing, unknown = layout.ignored(config), [], set(tensors)
    for own, shape in state_shapes(config).items():
        places = layout.places(own, config)
        unknown -= set(places)
        found = [tensors[place] for place in places if place in tensors]
        if own not in layout.derived or found:
            missing += [place for place in places if place not in tensors]
        wrong += [_misfit(place, tensors[place], shape) for place in places if place in tensors]
        if found:
            state[own] = found[0]
            wrong += [f"{place} differs from {places[0]}, which it shares" for place in _others(places, tensors)]
    wrong += [_misfit(name, tensors[name], shape) for name, shape in ignored.items() if name in tensors]
    unknown -= set(ignored)
    refuse({"missing": sorted(missing), "unknown": sorted(unknown), "wrong": [text for text in wrong if text]})
    return state


def refuse(problems: Mapping[str, list[str]]) -> None:
    """Raises one error that names every problem, if there is any."""
    if any(problems.values()):
        raise ModelError(
            "The tensors do not fit the head that config.json describes",
            got="; ".join(f"{label}: {', '.join(found)}" for label, found in problems.items() if found),
            next_step="Fetch the head again, or correct its config.json.",
        )


def matrix_shape(shapes: Shapes, name: str) -> tuple[int, int]:
    """Rows and columns of a matrix of the file, where nothing else says how wide the head is."""
    refuse({"missing": [] if name in shapes else [name]})
    shape = shapes[name]
    refuse({"wrong": [] if len(shape) == 2 else [f"{name} is {list(shape)} and must be a matrix"]})
    return shape[0], shape[1]


def _misfit(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> str:
    got = tuple(tensor.shape)
    return "" if got == shape else f"{name} is {list(got)} and must be {list(shape)}"


def _others(places: tuple[str, ...], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Places that should hold what the first one holds, and do not."""
    first = tensors.get(places[0])
    if first is None:
        return []
    same_shape = [p for p in places[1:] if p in tensors and tensors[p].shape == first.shape]
    return [place for place in same_shape if not torch.equal(tensors[place], first)]
