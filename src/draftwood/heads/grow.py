"""Change the shape of a trained head and keep what it has learned.

A larger inner size adds units that contribute nothing at first, so the head computes the same. A head that gives up its
own lm_head uses the target's and can then suggest every token.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftwood.errors import OptionError
from draftwood.heads.build import HeadModule, build_head
from draftwood.heads.config import HeadConfig
from draftwood.targets import TargetParts

GROWS = ("intermediate_size", "own_lm_head")  # fields of HeadConfig that can change


def grow_head(head: HeadModule, changes: Mapping[str, Any], parts: TargetParts, seed: int) -> HeadModule:
    """Return a head with ``changes`` to the fields `GROWS`. ``parts`` are those of the target; both stay bound."""
    before = head.config
    grown = build_head(_changed(before, changes), device=parts.norm.device)
    grown.bind(parts)
    grown.reset_parameters(torch.Generator().manual_seed(seed))
    learned = head.state_dict()
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            _fill(parameter, learned[name])
    return grown


def _changed(config: HeadConfig, changes: Mapping[str, Any]) -> HeadConfig:
    size = changes.get("intermediate_size", config.intermediate_size)
    if size < config.intermediate_size:
        _refuse("intermediate_size", size, f"{config.intermediate_size} or more")
    if changes.get("own_lm_head", False) and not config.own_lm_head:
        _refuse("own_lm_head", True, "false: the head in head.start has none")
    if not changes.get("own_lm_head", config.own_lm_head):
        return replace(config, **changes, draft_vocab_size=config.vocab_size)
    return replace(config, **changes)


def _fill(parameter: Tensor, learned: Tensor) -> None:
    """Copy what was learned. New inputs of a matrix have no effect, new outputs stay as initialized."""
    if parameter.ndim < 2:
        parameter.copy_(learned)
        return
    rows, columns = learned.shape
    parameter[:, columns:] = 0.0
    parameter[:rows, :columns] = learned


def _refuse(name: str, value: object, allowed: str) -> None:
    raise OptionError(f"head.changes.{name} does not fit the head in head.start", got=repr(value), allowed=allowed)
