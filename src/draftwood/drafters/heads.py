"""Drafters with a draft head: EAGLE 1 to 3, HASS, GRIFFIN, Medusa and Hydra. Only the heads differ."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from draftwood.drafters.checks import check_flag
from draftwood.drafters.neural import NeuralDrafter, SharedDraftModel
from draftwood.drafters.neural_options import NeuralOptions
from draftwood.errors import CapabilityError, OptionError
from draftwood.heads import ShippedHead, find_head, find_shipped_head, fingerprint, list_shipped_heads, load_head_for
from draftwood.sources.neural import make_head_model
from draftwood.targets import Target, TargetInfo, TargetParts
from draftwood.text import TextCodec

SLOT_FACTOR = 2  # cache slots per slot of the target; a head's cache is small and should never limit drafting


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions(NeuralOptions):
    head: str = ""  # folder, or name of a shipped head; empty: the head that ships for this target
    quantize: bool = True  # EAGLE-3 on a CPU: 4 bits, its output matrix 8; EAGLE on a GPU: 8 bits for large matrices
    shortlist: bool = True  # in 4 bits: leave out rare tokens that have not occurred, unless children are drawn

    def __post_init__(self) -> None:
        NeuralOptions.__post_init__(self)
        check_flag(self, "quantize", "shortlist")


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticHeadOptions(HeadOptions):
    growth: str = "static"


class HeadDrafter(NeuralDrafter):
    """Runs a draft head on the target's hidden states."""

    guesses_from = "a draft head on the target's hidden states (`head=FOLDER`)"
    tree_shape = "beam search (`growth=beam`)"
    can_leave = True  # it cannot skip tokens: it reads the target's hidden states of the whole text
    Options = HeadOptions
    kinds: ClassVar[tuple[str, ...]]  # accepted kinds of heads

    @classmethod
    def check(cls, options: HeadOptions) -> None:
        if options.head:
            find_head(options.head)
        elif not cls._shipped():
            raise cls._missing_head()

    @classmethod
    def attach(cls, options: HeadOptions, target: Target, codec: TextCodec) -> SharedDraftModel:
        info = target.info
        if not info.can_tap:
            raise CapabilityError(
                f"The target {info.name} does not expose its hidden states",
                got=info.backend,
                next_step="Use a drafter without a head.",
            )
        parts = target.parts()
        folder = find_head(options.head) if options.head else cls._find_shipped(info, parts)
        return cls.load(folder, options, target, parts)

    @classmethod
    def load(cls, folder: Path, options: HeadOptions, target: Target, parts: TargetParts) -> SharedDraftModel:
        """Load the head of a folder for this target."""
        info = target.info
        # On a CPU, torch is slow in half precision; only the target's own kernels are fast there.
        dtype = info.dtype if info.device.type == "cuda" else torch.float32
        head, config, _ = load_head_for(folder, target, dtype)
        if config.kind not in cls.kinds:
            raise OptionError(f"This head is not for the drafter {cls.name!r}", got=config.kind, allowed=cls.kinds)
        head.bind(parts)
        num_slots, quantize = SLOT_FACTOR * target.num_slots, options.quantize
        # Draws must not depend on the texts of other requests.
        has_shortlist = options.shortlist and not options.draw
        model = make_head_model(head, info.num_layers, num_slots, quantize=quantize, has_shortlist=has_shortlist)
        return cls.make_shared(model, options, info)

    @classmethod
    def _shipped(cls) -> list[ShippedHead]:
        """Shipped heads for this drafter. None for `hass` and `griffin`, which name a training method, not a kind."""
        return list_shipped_heads(cls.name)

    @classmethod
    def _find_shipped(cls, info: TargetInfo, parts: TargetParts) -> Path:
        head = find_shipped_head(cls.name, info, fingerprint(parts.norm))
        if head is None:
            raise cls._missing_head(info.name)
        return head.folder

    @classmethod
    def _missing_head(cls, target: str = "") -> OptionError:
        shipped = [head.title for head in cls._shipped()]
        return OptionError(
            f"The drafter {cls.name!r} needs a head" + (f", and none ships for {target}" if target else ""),
            allowed=["the folder of a head", *shipped],
            next_step="Train one, see docs/training.md, and name its folder: drafter_options={'head': 'FOLDER'}, "
            "or --drafter-option head=FOLDER.",
        )


class EagleDrafter(HeadDrafter):
    name = "eagle"
    summary = "EAGLE head with a static tree"
    tree_shape = "static"
    kinds = ("eagle",)
    Options = StaticHeadOptions


class Eagle2Drafter(HeadDrafter):
    name = "eagle2"
    summary = "EAGLE head with a tree grown by beam search"
    kinds = ("eagle",)


class Eagle3Drafter(HeadDrafter):
    name = "eagle3"
    summary = "EAGLE-3 head on three target layers, with its own draft vocabulary"
    kinds = ("eagle3",)


class HassDrafter(HeadDrafter):
    name = "hass"
    summary = "EAGLE head trained on its own features (HASS)"
    kinds = ("eagle",)


class GriffinDrafter(HeadDrafter):
    name = "griffin"
    summary = "EAGLE head trained on the tokens that it can reach (GRIFFIN)"
    kinds = ("eagle", "eagle3")


class MedusaDrafter(HeadDrafter):
    name = "medusa"
    summary = "Medusa heads: each guesses one position ahead, independently of the others"
    guesses_from = "heads for several tokens ahead (`head=FOLDER`)"
    tree_shape = "static"
    kinds = ("medusa",)
    Options = StaticHeadOptions


class HydraDrafter(HeadDrafter):
    name = "hydra"
    summary = "Hydra heads: each guesses one position ahead, given the guesses before it"
    guesses_from = "heads for several tokens ahead (`head=FOLDER`)"
    tree_shape = "static"
    kinds = ("hydra",)
    Options = StaticHeadOptions
