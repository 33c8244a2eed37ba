"""Base of the methods that continue a trained head: the token loss of another method, and a term about draft trees."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from draftwood.config import from_mapping
from draftwood.drafters import check_choice, check_int
from draftwood.errors import OptionError
from draftwood.heads import Head, HeadConfig
from draftwood.train.base import Batch, Losses, Signals
from draftwood.train.frozen import FrozenTarget
from draftwood.train.methods import method_class
from draftwood.train.methods.base import Method
from draftwood.train.trees import DraftBeam, DraftHead, DraftTrees, HeadRun, grow_draft_trees

TOKEN_LOSSES = ("auto", "eagle", "hass", "griffin", "eagle3")
DEFAULT_TOKEN_LOSS = {"eagle": "hass", "eagle3": "eagle3"}  # by kind of head


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedOptions:
    width: int = 10  # beam width of the draft trees
    nodes: int = 60  # nodes per tree, including the root
    depth: int = 7  # depth of the trees
    weight: float = 0.5  # weight of the tree loss, added to the token loss
    token_loss: str = "auto"  # method of the token loss; auto: hass, or eagle3 for EAGLE-3 heads
    token: Mapping[str, Any] = field(default_factory=dict)  # options of that method

    def __post_init__(self) -> None:
        check_int(self, 1, "width", "depth")
        check_int(self, 2, "nodes")
        check_choice(self, "token_loss", TOKEN_LOSSES)
        self.check_numbers(weight=0.0)
        if not isinstance(self.token, Mapping):
            raise OptionError("token must be a table of options", got=repr(self.token))

    def check_numbers(self, **least: float) -> None:
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < float("inf"):
                raise OptionError(f"{name} has an invalid value", got=repr(value), allowed=f"{low:g} or more")


class Terms(NamedTuple):
    """The two terms of the loss."""

    token: Losses
    tree: Tensor | None  # tree loss; None if no text is long enough for a tree
    found: dict[str, Tensor]  # statistics of the trees for the log


class AddedMethod(Method):
    """Subclasses define the tree loss."""

    kinds: ClassVar[tuple[str, ...]] = ("eagle", "eagle3")
    needs_trained_head: ClassVar[bool] = True

    options: AddedOptions

    def __init__(self, options: AddedOptions, head: Head, frozen: FrozenTarget, seed: int = 0) -> None:
        super().__init__(options, head, frozen, seed)
        cls, token_options = _token_method(options, head.config.kind)
        self.token_method = cls(token_options, head, frozen, seed)
        self._beam = DraftBeam(options.width, options.nodes, options.depth)

    @classmethod
    def outputs_per_position(cls, options: AddedOptions, head: HeadConfig) -> int:
        token, token_options = _token_method(options, head.kind)
        return token.outputs_per_position(token_options, head)

    @classmethod
    def scores_per_position(cls, options: AddedOptions, head: HeadConfig, length: int) -> int:
        token, token_options = _token_method(options, head.kind)
        return token.scores_per_position(token_options, head, length)

    def begin_step(self, step: int, num_steps: int) -> None:
        super().begin_step(step, num_steps)
        self.token_method.begin_step(step, num_steps)

    def losses(self, batch: Batch, signals: Signals) -> Losses:
        token, tree, found = self.terms(batch, signals)
        parts = {**token.parts, "token": token.total.detach()}
        if tree is None:
            return Losses(token.total, parts, token.weight)
        total = token.total + self.options.weight * tree
        return Losses(total, {**parts, **found, self.name: tree.detach(), "loss": total.detach()}, token.weight)

    def terms(self, batch: Batch, signals: Signals) -> Terms:
        self.token_method.checkpoints, self.token_method.block = self.checkpoints, self.block
        token = self.token_method.losses(batch, signals)
        return Terms(token, *self.tree_loss(batch, signals))

    @abstractmethod
    def tree_loss(self, batch: Batch, signals: Signals) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the tree loss, None if no text is long enough for a tree, and values for the log."""

    def seeds(self) -> tuple[int, int]:
        """Return seeds of random choices, which differ between the steps of training."""
        return self.seed, self.step if self.head.training else 0

    @torch.no_grad()
    def grow_trees(
        self, head: DraftHead, batch: Batch, signals: Signals, roots: Tensor, noise: torch.Generator | None = None
    ) -> DraftTrees:
        return grow_draft_trees(head, HeadRun(head, batch, signals, roots), self._beam, noise)


def _token_method(options: AddedOptions, kind: str) -> tuple[type[Method], Any]:
    """Return the method of the token loss and its options."""
    name = DEFAULT_TOKEN_LOSS[kind] if options.token_loss == "auto" else options.token_loss
    cls = method_class(name)
    return cls, from_mapping(cls.Options, options.token, f"The method {name!r}")
