"""GTO: a trained head goes on learning from what its own draft trees are worth.

Groups of adjacent positions are drawn from every text. Below each the head and its frozen copy from the start draft the
trees of decoding, and the target says how many tokens of each branch it would accept. A tree that gained more over the
copy's than others of its group is a reason to make its accepted branch likelier, and one that gained less to make it
less likely, within a clipped ratio. The token loss of an ordinary method goes along.

The head that the method is built with is the reference: a run that is resumed builds it with the head it started from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from draftwood.config import from_mapping
from draftwood.drafters import check_choice, check_flag, check_share, check_whole
from draftwood.errors import OptionError
from draftwood.heads import Head, HeadConfig, build_head
from draftwood.train.base import Batch, Losses, Signals
from draftwood.train.frozen import FrozenTarget
from draftwood.train.methods import method_class
from draftwood.train.methods.base import Method
from draftwood.train.trees import (
    REWARDS,
    Branch,
    DraftBeam,
    DraftHead,
    DraftTrees,
    HeadRun,
    accepted_branch,
    advantages,
    branch_log_probs,
    clipped,
    counted_roots,
    drawn_groups,
    grow_draft_trees,
    padded,
    ratios,
    reward,
    texts_of,
    verify_trees,
)

TOKEN_LOSSES = ("auto", "eagle", "hass", "eagle3")
USUAL_TOKEN_LOSS = {"eagle": "hass", "eagle3": "eagle3"}  # by kind of head


@dataclass(frozen=True, kw_only=True, slots=True)
class GtoOptions:
    groups: int = 16  # K: of a text, at most
    group_size: int = 8  # m: adjacent positions
    width: int = 10  # the draft trees, as in decoding
    nodes: int = 60  # the root included
    depth: int = 7
    reward: str = "lse"  # how a tree's branches are put together: smooth maximum, max or mean
    eta: float = 1.0  # sharpness of the smooth maximum
    debias: bool = True  # the reward of the reference's tree is taken off
    delta: float = 1e-4  # added to a group's deviation
    epsilon: float = 0.2  # how far a ratio may go from 1
    weight: float = 0.5  # omega: of all this against the token loss
    token_loss: str = "auto"  # a method that trains heads of this kind; auto: hass, for EAGLE-3 heads eagle3
    token: Mapping[str, Any] = field(default_factory=dict)  # its options

    def __post_init__(self) -> None:
        check_whole(self, 1, "groups", "group_size", "width", "depth")
        check_whole(self, 2, "nodes")
        check_choice(self, "reward", REWARDS)
        check_choice(self, "token_loss", TOKEN_LOSSES)
        check_flag(self, "debias")
        check_share(self, "epsilon")
        for name, least in (("eta", 1e-6), ("delta", 1e-12), ("weight", 0.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < float("inf"):
                raise OptionError(f"{name} makes no sense", got=repr(value), allowed=f"{least:g} or more")
        if not isinstance(self.token, Mapping):
            raise OptionError("token is a table of options", got=repr(self.token))


class Judged(NamedTuple):
    """What is known about the trees below all roots; no gradients."""

    rewards: Tensor  # [B, R]
    reference: Tensor  # [B, R] those of the reference's trees
    branch: Branch  # [B, R, D]


class Terms(NamedTuple):
    """The two things that are learned from."""

    token: Losses
    tree: Tensor | None  # what is to go down for the sake of trees; None: no text is long enough for a group
    found: dict[str, Tensor]  # about the trees, for the log


class GtoMethod(Method):
    name: ClassVar[str] = "gto"
    kinds: ClassVar[tuple[str, ...]] = ("eagle", "eagle3")
    goes_on: ClassVar[bool] = True
    Options = GtoOptions

    options: GtoOptions

    def __init__(self, options: GtoOptions, head: Head, frozen: FrozenTarget, seed: int = 0) -> None:
        super().__init__(options, head, frozen, seed)
        cls, token_options = _token_method(options, head.config.kind)
        self.token_method = cls(token_options, head, frozen, seed)
        self.reference = frozen_copy(head)
        self._beam = DraftBeam(options.width, options.nodes, options.depth)

    @classmethod
    def outputs_per_position(cls, options: GtoOptions, head: HeadConfig) -> int:
        token, token_options = _token_method(options, head.kind)
        return token.outputs_per_position(token_options, head)

    @classmethod
    def scores_per_position(cls, options: GtoOptions, head: HeadConfig, length: int) -> int:
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
        return Losses(total, {**parts, **found, "gto": tree.detach(), "loss": total.detach()}, token.weight)

    def terms(self, batch: Batch, signals: Signals) -> Terms:
        self.token_method.checkpoints, self.token_method.block = self.checkpoints, self.block
        token = self.token_method.losses(batch, signals)
        rows = self._groups(batch)
        if not any(rows):
            return Terms(token, None, {})
        roots, is_root = padded(rows, 1, batch.token_ids.device)  # [B, R]
        judged = self._judge(batch, signals, roots, rows)
        return Terms(token, *self._objective(batch, signals, roots, is_root, judged))

    def _groups(self, batch: Batch) -> list[list[int]]:
        """The members of the groups of each text; other ones at every step."""
        options, step = self.options, self.step if self.head.training else 0
        return [
            drawn_groups(roots, options.groups, options.group_size, text, self.seed, step)
            for text, roots in zip(texts_of(batch), counted_roots(batch), strict=True)
        ]

    @torch.no_grad()
    def _judge(self, batch: Batch, signals: Signals, roots: Tensor, rows: list[list[int]]) -> Judged:
        trees = [self._trees(head, batch, signals, roots) for head in (cast(DraftHead, self.head), self.reference)]
        verified = verify_trees(self.frozen.target, texts_of(batch), rows, trees)
        own, reference = (
            reward(said.probs, tree, self.options.reward, self.options.eta)
            for said, tree in zip(verified, trees, strict=True)
        )
        return Judged(own, reference, accepted_branch(verified[0].choices, trees[0]))

    def _trees(self, head: DraftHead, batch: Batch, signals: Signals, roots: Tensor) -> DraftTrees:
        return grow_draft_trees(head, HeadRun(head, batch, signals, roots), self._beam)

    def _objective(
        self, batch: Batch, signals: Signals, roots: Tensor, is_root: Tensor, judged: Judged
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and what is worth a line in the log."""
        options, branch = self.options, judged.branch
        gained = judged.rewards - judged.reference if options.debias else judged.rewards
        in_groups = gained.view(len(gained), -1, options.group_size)
        advantage = advantages(in_groups, options.delta).view_as(gained)  # [B, R]
        run = HeadRun(cast(DraftHead, self.head), batch, signals, roots, checkpoints=self.checkpoints)
        own = branch_log_probs(cast(DraftHead, self.head), run, branch, is_root)
        with torch.no_grad():
            run = HeadRun(self.reference, batch, signals, roots, fused=False)  # rounds as the head does
            reference = branch_log_probs(self.reference, run, branch, is_root)
        ratio = ratios(own, reference, branch.length)  # [B, R]
        count = is_root.sum()
        loss = -(clipped(ratio, advantage, options.epsilon) * is_root).sum() / count
        away = (ratio.detach() - 1.0).abs()
        logged = {
            "reward": judged.rewards,
            "reward_gain": judged.rewards - judged.reference,
            "accepted": branch.length.float(),
            "ratio_away": away,
            "clipped": (away > options.epsilon).float(),
        }
        return loss, {name: (each * is_root).sum() / count for name, each in logged.items()}


def _token_method(options: GtoOptions, kind: str) -> tuple[type[Method], Any]:
    """That goes along, for a head of this kind, and its options."""
    name = USUAL_TOKEN_LOSS[kind] if options.token_loss == "auto" else options.token_loss
    cls = method_class(name)
    return cls, from_mapping(cls.Options, options.token, f"The method {name!r}")


def frozen_copy(head: Head) -> DraftHead:
    """The head as it is now, with the same target; nothing trains it."""
    weight = next(head.parameters())
    copy = build_head(head.config, device=weight.device, dtype=weight.dtype)
    copy.load_state_dict(head.state_dict())
    copy.bind(head.parts)
    return cast(DraftHead, copy.eval().requires_grad_(False))
