"""Reach: train a trained head further on how far its own draft trees follow the target.

At sampled positions of a text the head grows the tree that it would draft there. A node of value v (the logarithm of
its path probability) is in the tree if v is above the value of the tree's edge, its last node. The text says which
nodes the target accepts: the tokens that follow the position. The number of these that are inside is what decoding
gains in a cycle. The objective is that number with smooth membership:

    sum over j of sigmoid((v_j - edge) / softness)

v_j is the head's value of the text's next j tokens. Gradients flow into v_j and into the edge. Nodes far inside or far
outside get none: the term acts where a little more probability changes the tree. If Gumbel noise of scale ``softness``
is added to both values, the sum is the expected number of accepted tokens over that noise.

The token loss of another method is added. The target runs no trees: texts that it wrote greedily show its greedy
choices, and drawn texts its distribution.
"""

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from draftwood.drafters import check_int
from draftwood.train.base import Batch, Signals
from draftwood.train.methods.added import AddedMethod, AddedOptions
from draftwood.train.trees import (
    Branch,
    DraftHead,
    DraftTrees,
    HeadRun,
    branch_log_probs,
    branch_to,
    counted_roots,
    padded,
    sample_roots,
    texts_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReachOptions(AddedOptions):
    weight: float = 1.0  # weight of the tree loss, added to the token loss
    roots: int = 32  # positions per text, different ones at every step
    softness: float = 1.0  # kappa: width of the edge, in nats

    def __post_init__(self) -> None:
        AddedOptions.__post_init__(self)
        check_int(self, 1, "roots")
        self.check_numbers(softness=1e-3)


class ReachMethod(AddedMethod):
    name: ClassVar[str] = "reach"
    Options = ReachOptions

    options: ReachOptions

    def tree_loss(self, batch: Batch, signals: Signals) -> tuple[Tensor | None, dict[str, Tensor]]:
        rows = [
            sample_roots(roots, self.options.roots, text, *self.seeds())
            for text, roots in zip(texts_of(batch), counted_roots(batch), strict=True)
        ]
        if not any(rows):
            return None, {}
        head = cast(DraftHead, self.head)
        roots, is_root = padded(rows, 1, batch.token_ids.device)  # [B, R]
        trees = self.grow_trees(head, batch, signals, roots)
        written = follow_text(head, batch, roots, self.options.depth)
        last = torch.full_like(roots[..., None], trees.depths.shape[-1] - 1)  # nodes are sorted by value
        edge = branch_to(last, trees).pad(self.options.depth)
        both = Branch(*(torch.cat(parts, dim=1) for parts in zip(written, edge, strict=True)))
        run = HeadRun(head, batch, signals, roots.repeat(1, 2), checkpoints=self.checkpoints)
        logs = branch_log_probs(head, run, both, is_root.repeat(1, 2))  # [B, 2 * R, D]
        values, of_edge = logs[:, : roots.shape[1]].cumsum(dim=-1), logs[:, roots.shape[1] :].sum(dim=-1)
        counts = _is_before(written.length, self.options.depth) & is_root[..., None]  # [B, R, D]
        inside = ((values - of_edge[..., None]) / self.options.softness).sigmoid() * counts
        number = is_root.sum()
        reach = inside.sum() / number
        accepted = (accepted_length(trees, written) * is_root).sum() / number
        return -reach, {"accepted": accepted, "edge": (of_edge.detach() * is_root).sum() / number}


def follow_text(head: DraftHead, batch: Batch, roots: Tensor, depth: int) -> Branch:
    """Return the next tokens of the text after each root, [B, R, D], up to the end of the answer or a token that the
    head does not have."""
    places = roots[..., None] + torch.arange(1, depth + 1, device=roots.device)  # [B, R, D]
    inside = places < batch.token_ids.shape[1]
    places = torch.where(inside, places, 0)
    tokens, answered = (
        torch.take_along_dim(each[:, None], places, dim=2) for each in (batch.token_ids, batch.answered)
    )
    fits = inside & answered & (head.draft_ids(tokens) >= 0)
    length = fits.cumprod(dim=-1).sum(dim=-1)
    return Branch(torch.where(_is_before(length, depth), tokens, 0), length)


def accepted_length(trees: DraftTrees, written: Branch) -> Tensor:
    """Return the number of tokens of ``written`` that lie in the trees, [B, R]."""
    node = torch.zeros_like(trees.parents[..., :1])  # [B, R, 1]
    is_below = trees.depths > 0
    reached = torch.zeros_like(written.length)
    for depth in range(written.tokens.shape[-1]):
        fits = (trees.parents == node) & is_below & (trees.tokens == written.tokens[..., depth : depth + 1])
        goes_on = fits.any(dim=-1) & (written.length > depth) & (reached == depth)
        reached = reached + goes_on
        node = torch.where(goes_on[..., None], fits.int().argmax(dim=-1, keepdim=True), node)
    return reached


def _is_before(length: Tensor, depth: int) -> Tensor:
    """Return [..., D] bool: the first ``length`` entries."""
    return torch.arange(depth, device=length.device) < length[..., None]
