"""GTO: train a trained head further on the rewards of its own draft trees.

Groups of adjacent positions are sampled from every text. At each position the head and its frozen initial copy (the
reference) draft trees as in decoding, and the target verifies them. The advantage of a tree is its reward over the
reference's tree, normalised in its group. A clipped policy-gradient objective makes the accepted branch of a tree more
likely if its advantage is positive, and less likely if it is negative. The token loss of another method is added.

The reference is the head that the method is built with: a resumed run builds it from the head that it started with.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from draftwood.config import from_mapping
from draftwood.drafters import check_choice, check_flag, check_fraction, check_int
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
    grow_draft_trees,
    padded,
    ratios,
    reward,
    sample_groups,
    texts_of,
    verify_trees,
)

TOKEN_LOSSES = ("auto", "eagle", "hass", "eagle3")
DEFAULT_TOKEN_LOSS = {"eagle": "hass", "eagle3": "eagle3"}  # by kind of head


@dataclass(frozen=True, kw_only=True, slots=True)
class GtoOptions:
    groups: int = 16  # K: maximum number of groups per text
    group_size: int = 8  # m: adjacent positions per group
    width: int = 10  # beam width of the draft trees
    nodes: int = 60  # nodes per tree, including the root
    depth: int = 7  # depth of the trees
    reward: str = "lse"  # aggregation of the branches of a tree: lse (smooth maximum), max or mean
    eta: float = 1.0  # sharpness of the smooth maximum
    debias: bool = True  # subtract the reward of the reference's tree
    delta: float = 1e-4  # added to the standard deviation of a group
    epsilon: float = 0.2  # clipping range of the probability ratio around 1
    weight: float = 0.5  # omega: weight of the tree loss, added to the token loss
    token_loss: str = "auto"  # method of the token loss; auto: hass, or eagle3 for EAGLE-3 heads
    token: Mapping[str, Any] = field(default_factory=dict)  # options of that method

    def __post_init__(self) -> None:
        check_int(self, 1, "groups", "group_size", "width", "depth")
        check_int(self, 2, "nodes")
        check_choice(self, "reward", REWARDS)
        check_choice(self, "token_loss", TOKEN_LOSSES)
        check_flag(self, "debias")
        check_fraction(self, "epsilon")
        for name, least in (("eta", 1e-6), ("delta", 1e-12), ("weight", 0.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < float("inf"):
                raise OptionError(f"{name} has an invalid value", got=repr(value), allowed=f"{least:g} or more")
        if not isinstance(self.token, Mapping):
            raise OptionError("token must be a table of options", got=repr(self.token))


class Verdicts(NamedTuple):
    """Rewards and accepted branches of the trees at all roots, without gradients."""

    rewards: Tensor  # [B, R]
    reference: Tensor  # [B, R] rewards of the reference's trees
    branch: Branch  # [B, R, D]


class Terms(NamedTuple):
    """The two terms of the loss."""

    token: Losses
    tree: Tensor | None  # tree loss; None if no text is long enough for a group
    found: dict[str, Tensor]  # statistics of the trees for the log


class GtoMethod(Method):
    name: ClassVar[str] = "gto"
    kinds: ClassVar[tuple[str, ...]] = ("eagle", "eagle3")
    needs_trained_head: ClassVar[bool] = True
    Options = GtoOptions

    options: GtoOptions

    def __init__(self, options: GtoOptions, head: Head, frozen: FrozenTarget, seed: int = 0) -> None:
        super().__init__(options, head, frozen, seed)
        cls, token_options = _token_method(options, head.config.kind)
        self.token_method = cls(token_options, head, frozen, seed)
        self.reference = copy_frozen(head)
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
        rows = self._sample_groups(batch)
        if not any(rows):
            return Terms(token, None, {})
        roots, is_root = padded(rows, 1, batch.token_ids.device)  # [B, R]
        verdicts = self._judge(batch, signals, roots, rows)
        return Terms(token, *self._objective(batch, signals, roots, is_root, verdicts))

    def _sample_groups(self, batch: Batch) -> list[list[int]]:
        """Sample the groups of each text, different ones at every step."""
        options, step = self.options, self.step if self.head.training else 0
        return [
            sample_groups(roots, options.groups, options.group_size, text, self.seed, step)
            for text, roots in zip(texts_of(batch), counted_roots(batch), strict=True)
        ]

    @torch.no_grad()
    def _judge(self, batch: Batch, signals: Signals, roots: Tensor, rows: list[list[int]]) -> Verdicts:
        trees = [self._grow_trees(head, batch, signals, roots) for head in (cast(DraftHead, self.head), self.reference)]
        verified = verify_trees(self.frozen.target, texts_of(batch), rows, trees)
        own, reference = (
            reward(result.probs, tree, self.options.reward, self.options.eta)
            for result, tree in zip(verified, trees, strict=True)
        )
        return Verdicts(own, reference, accepted_branch(verified[0].choices, trees[0]))

    def _grow_trees(self, head: DraftHead, batch: Batch, signals: Signals, roots: Tensor) -> DraftTrees:
        return grow_draft_trees(head, HeadRun(head, batch, signals, roots), self._beam)

    def _objective(
        self, batch: Batch, signals: Signals, roots: Tensor, is_root: Tensor, verdicts: Verdicts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the tree loss and values for the log."""
        options, branch = self.options, verdicts.branch
        gained = verdicts.rewards - verdicts.reference if options.debias else verdicts.rewards
        in_groups = gained.view(len(gained), -1, options.group_size)
        advantage = advantages(in_groups, options.delta).view_as(gained)  # [B, R]
        run = HeadRun(cast(DraftHead, self.head), batch, signals, roots, checkpoints=self.checkpoints)
        own = branch_log_probs(cast(DraftHead, self.head), run, branch, is_root)
        with torch.no_grad():
            run = HeadRun(self.reference, batch, signals, roots, fused=False)  # the same rounding as the head
            reference = branch_log_probs(self.reference, run, branch, is_root)
        ratio = ratios(own, reference, branch.length)  # [B, R]
        count = is_root.sum()
        loss = -(clipped(ratio, advantage, options.epsilon) * is_root).sum() / count
        away = (ratio.detach() - 1.0).abs()
        logged = {
            "reward": verdicts.rewards,
            "reward_gain": verdicts.rewards - verdicts.reference,
            "accepted": branch.length.float(),
            "ratio_away": away,
            "clipped": (away > options.epsilon).float(),
        }
        return loss, {name: (each * is_root).sum() / count for name, each in logged.items()}


def _token_method(options: GtoOptions, kind: str) -> tuple[type[Method], Any]:
    """Return the method of the token loss and its options."""
    name = DEFAULT_TOKEN_LOSS[kind] if options.token_loss == "auto" else options.token_loss
    cls = method_class(name)
    return cls, from_mapping(cls.Options, options.token, f"The method {name!r}")


def copy_frozen(head: Head) -> DraftHead:
    """Copy the head without gradients, bound to the same target."""
    weight = next(head.parameters())
    copy = build_head(head.config, device=weight.device, dtype=weight.dtype)
    copy.load_state_dict(head.state_dict())
    copy.bind(head.parts)
    return cast(DraftHead, copy.eval().requires_grad_(False))
