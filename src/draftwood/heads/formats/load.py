"""Load and save heads in any layout."""

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
from draftwood.heads.formats.layout import Export, Json, Layout, map_state
from draftwood.heads.formats.medusa import MedusaLayout
from draftwood.heads.formats.sglang import SglangLayout
from draftwood.heads.formats.speculators import SpeculatorsLayout
from draftwood.heads.formats.vllm import VllmLayout
from draftwood.heads.vocabulary import check_vocabulary, decode_offsets, token_mask
from draftwood.models import ModelConfig, architecture_of

# In the order in which they are tried: the most specific first.
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
_BUFFERS = ("rotary_emb.inv_freq",)  # in old checkpoints; computed from config.json


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
    """Load a head of any known layout. ``dtype`` None: as stored.

    ``model``, the target's configuration, is needed for layouts that do not store every field (Hydra++).
    """
    folder = Path(path).expanduser()
    content = read_config_file(folder)
    tensors = {name: t for name, t in read_tensors(folder).items() if not name.endswith(_BUFFERS)}
    layout = _recognise(content, set(tensors), folder)
    tensors = _normalize_names(layout, tensors)
    config = layout.read_config(content, {name: tuple(t.shape) for name, t in tensors.items()}, model)
    state = map_state(layout, config, tensors)
    _check_maps(config, tensors)
    if config.has_draft_vocabulary:
        state["t2d"] = _build_mask(config, state)
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
    """Save a head in the layout ``to`` and return the folder. Raises if the layout cannot express the head.

    ``target_name`` and ``model`` describe its target, if its configuration does not yet.
    """
    config = replace(
        head.config,
        target_name=target_name or head.config.target_name,
        target_num_layers=model.num_layers if model is not None else head.config.target_num_layers,
    )
    layout = _choose_layout(to, config)
    tensors = {}
    for own, tensor in head.state_dict().items():
        first, *further = layout.stored_names(own, config)
        tensors[first] = tensor.detach().cpu().contiguous()
        tensors |= {place: tensors[first].clone() for place in further}
    dtype = next(str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point())
    content = layout.write_config(config, Export(dtype, model.architecture if model is not None else ""))
    final = Path(folder).expanduser()
    write_folder(final, content, tensors, layout.weights, force=force)
    return final


def _choose_layout(name: str, config: HeadConfig) -> Layout:
    """The layout of this name for this kind of head. Raises if it cannot express the head."""
    if name not in FORMATS:
        raise OptionError("There is no such layout", got=repr(name), allowed=FORMATS)
    layout = next((each for each in LAYOUTS if each.name == name and config.kind in each.kinds), None)
    found = ["it is of another kind"] if layout is None else layout.objections(config)
    if layout is None or found:
        able = [each.name for each in LAYOUTS if config.kind in each.kinds and not each.objections(config)]
        raise CapabilityError(
            f"The layout {name!r} cannot express this {config.kind} head",
            got="; ".join(found),
            allowed=[each for each in FORMATS if each in able],
        )
    return layout


def _recognise(content: Json, names: set[str], folder: Path) -> Layout:
    layout = next((each for each in LAYOUTS if each.recognises(content, names)), None)
    if layout is None:
        few = ", ".join(sorted(names)[:4])
        raise ModelError(
            "This folder does not contain a known kind of head",
            got=f"{folder}: {architecture_of(content)} with tensors {few}, ...",
            allowed=FORMATS,
        )
    return layout


def _normalize_names(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors under the layout's usual names."""
    normalized = {layout.normalize_name(name): tensor for name, tensor in tensors.items()}
    if len(normalized) < len(tensors):
        twice = [name for name in tensors if name not in normalized and layout.normalize_name(name) in tensors]
        raise ModelError("The head contains the same tensors under two names", got=", ".join(sorted(twice)))
    return normalized


def _check_maps(config: HeadConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Vocabulary maps must hold whole numbers, and must be the identity in a head with the full vocabulary."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is not None and d2t.is_floating_point():
        raise ModelError("d2t must hold whole numbers", got=str(d2t.dtype))
    if config.kind == "eagle3" and not config.has_draft_vocabulary:
        moves = d2t is not None and bool(d2t.any())
        if moves or (t2d is not None and not bool(t2d.all())):
            raise ModelError(
                "d2t and t2d map to other tokens, but the head has as many as its target",
                got=f"draft_vocab_size {config.draft_vocab_size}",
                next_step="Correct draft_vocab_size in config.json.",
            )


def _build_mask(config: HeadConfig, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The mask t2d of the head's tokens, computed from d2t. A stored mask must be the same."""
    tokens = check_vocabulary(decode_offsets(state["d2t"]), config.draft_vocab_size, config.vocab_size)
    mask, stored = token_mask(tokens, config.vocab_size), state.get("t2d")
    if stored is not None and not torch.equal(stored.bool(), mask):
        raise ModelError(
            "d2t and t2d do not belong together",
            got=f"t2d has {int(stored.bool().sum())} tokens, {int((stored.bool() & mask).sum())} of them in d2t",
            allowed=f"the {config.draft_vocab_size} tokens of d2t",
            next_step="Download the head again.",
        )
    return mask
