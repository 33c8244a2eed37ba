"""Does a head fit a target? By shape, and by the fingerprint of the target that it was trained for."""

from pathlib import Path
from typing import Protocol

import torch

from draftwood.errors import ModelError
from draftwood.heads.config import HeadConfig
from draftwood.heads.formats import LoadedHead, load_head
from draftwood.heads.target import find_local_fingerprint, native_config
from draftwood.targets import Target


class TargetShape(Protocol):
    """The sizes that a head must agree with; ``TargetInfo`` and ``ModelConfig`` have them."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...


def check_fit(config: HeadConfig, target: TargetShape) -> list[str]:
    """The reasons why the head does not fit a target of this shape; empty if it does."""
    found = []
    if config.target_hidden_size != target.hidden_size:
        found.append(f"hidden size: the head needs {config.target_hidden_size}, the target has {target.hidden_size}")
    if config.vocab_size != target.vocab_size:
        found.append(f"vocabulary: the head needs {config.vocab_size} tokens, the target has {target.vocab_size}")
    beyond = [tap for tap in config.taps if tap > target.num_layers]
    if beyond:
        found.append(f"taps: the head reads {beyond}, the target has {target.num_layers} layers")
    if config.kind != "eagle3" and config.taps and config.taps[0] != target.num_layers and not beyond:
        found.append(f"taps: the head reads {list(config.taps)}, the target's last state is {target.num_layers}")
    if config.target_num_layers and config.target_num_layers != target.num_layers:
        found.append(f"layers: the head was made for {config.target_num_layers}, the target has {target.num_layers}")
    return found


def was_trained_for(config: HeadConfig, name: str) -> bool | None:
    """Whether the head was trained for the model of this name; None if a fingerprint is missing."""
    found = find_local_fingerprint(name) if config.target_fingerprint else ""
    return found == config.target_fingerprint if found else None


def load_head_for(folder: Path, target: Target, dtype: torch.dtype) -> LoadedHead:
    """Load a head on the target's device. Raises if it does not fit the target's shape."""
    info = target.info
    loaded = load_head(folder, info.device, dtype, model=native_config(target))
    problems = check_fit(loaded.config, info)
    if problems:
        raise ModelError(
            f"The head in {folder} does not fit {info.name}",
            got="; ".join(problems),
            next_step=f"Run: draftwood inspect head {folder} --model ...",
        )
    return loaded
