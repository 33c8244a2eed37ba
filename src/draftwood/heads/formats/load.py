"""Loading and saving heads, whatever their layout."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from draftwood.errors import CapabilityError, ModelError, OptionError
from draftwood.heads.build import HeadModule, build_head
from draftwood.heads.config import HeadConfig
from draftwood.heads.formats.draftwood import DraftwoodLayout
from draftwood.heads.formats.eagle import EagleLayout
from draftwood.heads.formats.eagle1 import Eagle1Layout
from draftwood.heads.formats.files import read_config_file, read_tensors, write_folder
from draftwood.heads.formats.hydra import HydraLayout
from draftwood.heads.formats.layout import Export, Json, Layout, state_from
from draftwood.heads.formats.medusa import MedusaLayout
from draftwood.heads.formats.sglang import SglangLayout
from draftwood.heads.formats.speculators import SpeculatorsLayout
from draftwood.heads.formats.vllm import VllmLayout
from draftwood.heads.vocabulary import check_vocabulary, token_mask, tokens_of
from draftwood.models import ModelConfig, architecture_of

# In the order they are tried: what says most about itself first.
LAYOUTS: tuple[Layout, ...] = (
    DraftwoodLayout(),
    SpeculatorsLayout(),
    MedusaLayout(),
    HydraLayout(),
    VllmLayout(),
    SglangLayout(),
    EagleLayout(),
    Eagle1Layout(),
)
FORMATS = ("draftwood", "eagle", "sglang", "vllm", "speculators", "medusa", "hydra")
_BUFFERS = ("rotary_emb.inv_freq",)  # old checkpoints carry them; they follow from config.json


class LoadedHead(NamedTuple):
    head: HeadModule
    config: HeadConfig
    format: str


def load_head(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    model: ModelConfig | None = None,
) -> LoadedHead:
    """Reads a head of any known layout. ``dtype`` None: as it is stored.

    ``model``, the target's configuration, is needed where a layout leaves something to it (Hydra++).
    """
    folder = Path(path).expanduser()
    content = read_config_file(folder)
    tensors = {name: t for name, t in read_tensors(folder).items() if not name.endswith(_BUFFERS)}
    layout = _recognised(content, set(tensors), folder)
    tensors = _spelled(layout, tensors)
    config = layout.read_config(content, {name: tuple(t.shape) for name, t in tensors.items()}, model)
    state = state_from(layout, config, tensors)
    _check_maps(config, tensors)
    if config.has_draft_vocabulary:
        state["t2d"] = _mask(config, state)
    kept = {name: t.to(device=device, dtype=dtype if t.is_floating_point() else None) for name, t in state.items()}
    head = build_head(config, device="meta")
    head.load_state_dict(kept, assign=True)
    return LoadedHead(head.eval(), config, layout.name)


def save_head(
    head: HeadModule,
    folder: str | os.PathLike[str],
    *,
    to: str = "draftwood",
    target_name: str = "",
    model: ModelConfig | None = None,
    force: bool = False,
) -> Path:
    """Writes a head in the layout ``to``; refuses what that cannot express. Returns the folder.

    ``target_name`` and ``model`` say which target it drafts for, where its configuration does not yet.
    """
    config = replace(
        head.config,
        target_name=target_name or head.config.target_name,
        target_num_layers=model.num_layers if model is not None else head.config.target_num_layers,
    )
    layout = _layout_for(to, config)
    tensors = {}
    for own, tensor in head.state_dict().items():
        first, *further = layout.places(own, config)
        tensors[first] = tensor.detach().cpu().contiguous()
        tensors |= {place: tensors[first].clone() for place in further}
    dtype = next(str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point())
    content = layout.write_config(config, Export(dtype, model.architecture if model is not None else ""))
    final = Path(folder).expanduser()
    write_folder(final, content, tensors, layout.weights, force=force)
    return final


def _layout_for(name: str, config: HeadConfig) -> Layout:
    """The layout of this name for this kind of head, if it can express the head."""
    if name not in FORMATS:
        raise OptionError("There is no such layout", got=repr(name), allowed=FORMATS)
    layout = next((each for each in LAYOUTS if each.name == name and config.kind in each.kinds), None)
    found = ["it is of another kind"] if layout is None else layout.objections(config)
    if layout is None or found:
        able = [each.name for each in LAYOUTS if config.kind in each.kinds and not each.objections(config)]
        raise CapabilityError(
            f"The layout {name!r} has no place for this {config.kind} head",
            got="; ".join(found),
            allowed=[each for each in FORMATS if each in able],
        )
    return layout


def _recognised(content: Json, names: set[str], folder: Path) -> Layout:
    layout = next((each for each in LAYOUTS if each.recognises(content, names)), None)
    if layout is None:
        few = ", ".join(sorted(names)[:4])
        raise ModelError(
            "This folder holds no head that is known",
            got=f"{folder}: {architecture_of(content)} with tensors {few}, ...",
            allowed=FORMATS,
        )
    return layout


def _spelled(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors under the layout's own spelling of their names."""
    spelled = {layout.spelled(name): tensor for name, tensor in tensors.items()}
    if len(spelled) < len(tensors):
        twice = [name for name in tensors if layout.spelled(name) != name and layout.spelled(name) in tensors]
        raise ModelError("The head holds the same tensors under two names", got=", ".join(sorted(twice)))
    return spelled


def _check_maps(config: HeadConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Maps of the vocabulary are whole numbers; where there is nothing to map they must not map anything."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is not None and d2t.is_floating_point():
        raise ModelError("d2t must hold whole numbers", got=str(d2t.dtype))
    if config.kind == "eagle3" and not config.has_draft_vocabulary:
        moves = d2t is not None and bool(d2t.any())
        if moves or (t2d is not None and not bool(t2d.all())):
            raise ModelError(
                "d2t and t2d map to other tokens, though the head has as many as its target",
                got=f"draft_vocab_size {config.draft_vocab_size}",
                next_step="Correct draft_vocab_size in config.json.",
            )


def _mask(config: HeadConfig, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Which tokens the head has, by d2t; a mask that is there already must say the same."""
    tokens = check_vocabulary(tokens_of(state["d2t"]), config.draft_vocab_size, config.vocab_size)
    mask, stored = token_mask(tokens, config.vocab_size), state.get("t2d")
    if stored is not None and not torch.equal(stored.bool(), mask):
        raise ModelError(
            "d2t and t2d do not belong together",
            got=f"t2d has {int(stored.bool().sum())} tokens, {int((stored.bool() & mask).sum())} of them in d2t",
            allowed=f"the {config.draft_vocab_size} tokens of d2t",
            next_step="Fetch the head again.",
        )
    return mask
