"""GTO: train a trained head further on the rewards of its own draft trees.

Groups of adjacent positions are sampled from every text. At each position the head and its frozen initial copy (the
reference) draft trees as in decoding, and the target verifies them. The advantage of a tree is its reward over the
reference's tree, normalised in its group. A clipped policy-gradient objective makes the accepted branch of a tree more
likely if its advantage is positive, and less likely if it is negative. The token loss of another method is added.

With ``drawn`` a group consists of several trees at one position instead. They are searched with Gumbel noise on the
head's log-probabilities, so they differ by chance alone, and the mean of the group is a fair baseline of each; no
reference tree is needed. The ratio of a branch is then divided by the depth of the trees instead of its own length:
tokens that all trees of a group accept get no gradient.

The reference is the head that the method is built with: a resumed run builds it from the head that it started with.
"""

import hashlib
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from draftwood.drafters import check_choice, check_flag, check_fraction, check_int
from draftwood.heads import Head, build_head
from draftwood.train.base import Batch, Signals
from draftwood.train.frozen import FrozenTarget
from draftwood.train.methods.added import AddedMethod, AddedOptions
from draftwood.train.trees import (
    REWARDS,
    Branch,
    DraftHead,
    DraftTrees,
    HeadRun,
    VerifiedTree,
    accepted_branch,
    advantages,
    branch_log_probs,
    clipped,
    counted_roots,
    padded,
    ratios,
    reward,
    sample_groups,
    texts_of,
    verify_trees,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GtoOptions(AddedOptions):
    groups: int = 16  # K: maximum number of groups per text
    group_size: int = 8  # m: trees per group
    drawn: bool = False  # a group is several trees at one position, drawn with Gumbel noise, not adjacent positions
    reward: str = "lse"  # aggregation of the branches of a tree: lse (smooth maximum), max or mean
    eta: float = 1.0  # sharpness of the smooth maximum
    debias: bool = True  # subtract the reward of the reference's tree
    delta: float = 1e-4  # added to the standard deviation of a group
    epsilon: float = 0.2  # clipping range of the probability ratio around 1

    def __post_init__(self) -> None:
        AddedOptions.__post_init__(self)
        check_int(self, 1, "groups", "group_size")
        check_choice(self, "reward", REWARDS)
        check_flag(self, "debias", "drawn")
        check_fraction(self, "epsilon")
        self.check_numbers(eta=1e-6, delta=1e-12)


class Verdicts(NamedTuple):
    """Rewards and accepted branches of the trees at all roots, without gradients."""

    rewards: Tensor  # [B, R]
    reference: Tensor  # [B, R] rewards of the reference's trees; 0 for drawn trees
    branch: Branch  # [B, R, D]


class GtoMethod(AddedMethod):
    name: ClassVar[str] = "gto"
    Options = GtoOptions

    options: GtoOptions

    def __init__(self, options: GtoOptions, head: Head, frozen: FrozenTarget, seed: int = 0) -> None:
        super().__init__(options, head, frozen, seed)
        self.reference = copy_frozen(head)

    def tree_loss(self, batch: Batch, signals: Signals) -> tuple[Tensor | None, dict[str, Tensor]]:
        rows = self._sample_groups(batch)
        if not any(rows):
            return None, {}
        roots, is_root = padded(rows, 1, batch.token_ids.device)  # [B, R]
        verdicts = self._judge(batch, signals, roots, rows)
        if self.options.drawn:
            roots, is_root = (each.repeat_interleave(self.options.group_size, dim=1) for each in (roots, is_root))
        return self._objective(batch, signals, roots, is_root, verdicts)

    def _sample_groups(self, batch: Batch) -> list[list[int]]:
        """Sample the groups of each text, different ones at every step. Return their positions."""
        options, seeds = self.options, self.seeds()
        size = 1 if options.drawn else options.group_size
        return [
            sample_groups(roots, options.groups, size, text, *seeds)
            for text, roots in zip(texts_of(batch), counted_roots(batch), strict=True)
        ]

    def _judge(self, batch: Batch, signals: Signals, roots: Tensor, rows: list[list[int]]) -> Verdicts:
        """Reward the trees. Drawn ones follow each other root by root, so R is a multiple of the roots."""
        options, pairs = self.options, self.verified_trees(batch, signals, roots, rows)
        rewards = [reward(result.probs, tree, options.reward, options.eta) for result, tree in pairs]
        if not options.drawn:
            result, tree = pairs[0]
            return Verdicts(rewards[0], rewards[1], accepted_branch(result.choices, tree))
        branches = [accepted_branch(result.choices, tree).pad(options.depth) for result, tree in pairs]
        own = torch.stack(rewards, dim=2).flatten(1, 2)
        branch = Branch(*(torch.stack(parts, dim=2).flatten(1, 2) for parts in zip(*branches, strict=True)))
        return Verdicts(own, torch.zeros_like(own), branch)

    @torch.no_grad()
    def verified_trees(
        self, batch: Batch, signals: Signals, roots: Tensor, rows: list[list[int]]
    ) -> list[tuple[VerifiedTree, DraftTrees]]:
        """Return the trees of head and reference, or the drawn trees of the head, as the target verified them."""
        head, options = cast(DraftHead, self.head), self.options
        if options.drawn:
            noise = self._noise(batch)
            trees = [self.grow_trees(head, batch, signals, roots, noise) for _ in range(options.group_size)]
        else:
            trees = [self.grow_trees(each, batch, signals, roots) for each in (head, self.reference)]
        return list(zip(verify_trees(self.frozen.target, texts_of(batch), rows, trees), trees, strict=True))

    def _noise(self, batch: Batch) -> torch.Generator:
        """Return the noise of a batch: it depends on its texts, the step and the seed."""
        content = f"{self.seeds()} {texts_of(batch)}".encode()
        seed = int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "big")
        return torch.Generator(batch.token_ids.device).manual_seed(seed)

    def _objective(
        self, batch: Batch, signals: Signals, roots: Tensor, is_root: Tensor, verdicts: Verdicts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the tree loss and values for the log."""
        options, branch = self.options, verdicts.branch
        head = cast(DraftHead, self.head)
        advantage = self.advantages(verdicts)  # [B, R]
        run = HeadRun(head, batch, signals, roots, checkpoints=self.checkpoints)
        own = branch_log_probs(head, run, branch, is_root).sum(dim=-1)
        with torch.no_grad():
            run = HeadRun(self.reference, batch, signals, roots, fused=False)  # the same rounding as the head
            reference = branch_log_probs(self.reference, run, branch, is_root).sum(dim=-1)
        length = torch.full_like(branch.length, options.depth) if options.drawn else branch.length
        ratio = ratios(own, reference, length)  # [B, R]
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
        if options.drawn:
            logged.pop("reward_gain")
        return loss, {name: (each * is_root).sum() / count for name, each in logged.items()}

    def advantages(self, verdicts: Verdicts) -> Tensor:
        """Return the advantage of each tree in its group, [B, R]."""
        options = self.options
        gained = verdicts.rewards - verdicts.reference if options.debias else verdicts.rewards
        in_groups = gained.view(len(gained), -1, options.group_size)
        return advantages(in_groups, options.delta).view_as(gained)


def copy_frozen(head: Head) -> DraftHead:
    """Copy the head without gradients, bound to the same target."""
    weight = next(head.parameters())
    copy = build_head(head.config, device=weight.device, dtype=weight.dtype)
    copy.load_state_dict(head.state_dict())
    copy.bind(head.parts)
    return cast(DraftHead, copy.eval().requires_grad_(False))
