"""Sampled verification: tokens with exactly the target's distribution that agree with the tree as often as they can.

At a node the target says p. The token that follows is settled first, then the walk looks whether a child carries it.

*Chosen* children: the drafter chose them, so the textbook rule is one-hot: accept the first with probability p(x), else
strike x from p, renormalise and try the next. All of that together is one draw from p. It is made as one draw: one
random number per emitted token, whatever the tree, so a seed gives the same output with every drafter that chooses.

*Drawn* children came without replacement from q. Accept x with probability min(1, p(x) / q(x)), else
p <- normalise(max(p - q, 0)), q <- normalise(q without x), and try the next in the order they were drawn in. The order
matters, and so does that a drafter never drops a drawn child because of the token it carries.

*Both*: the chosen first; then p and q are what is left of them without the chosen tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from draftwood.sampling import Randomness, SeededRandomness, check_drawn
from draftwood.tree import DraftTree, FloatArray, IntArray, Proposal
from draftwood.verify.base import AcceptedPath, walk

TINY = float(np.finfo(np.float64).tiny)


def accept_sampled(tree: DraftTree, probs_of: Callable[[int], torch.Tensor], randomness: Randomness) -> AcceptedPath:
    """``probs_of(node)`` [V] is the target's distribution after a node; it is asked for visited nodes only."""

    def token_after(node: int) -> int:
        probs = probs_of(node)
        proposal = tree.proposals.get(node)
        if proposal is None:
            return randomness.draw(probs)
        tokens = [tree.tokens[child] for child in tree.children_of(node)]
        first_drawn = tree.num_chosen.get(node, 0)
        chosen, drawn = tokens[:first_drawn], tokens[first_drawn:]
        if not drawn:
            return randomness.draw(probs)
        p = probs.detach().to("cpu", torch.float64, copy=True)  # [V]
        if chosen:
            token = randomness.draw(p)
            if token in chosen:
                return token
            p[chosen] = 0.0
        return _token_near_draws(p.numpy(), drawn, proposal, randomness)

    return walk(tree, token_after)


def upcoming_numbers(tree: DraftTree, randomness: SeededRandomness) -> list[float]:
    """The number that draws the token after each node, if that is reached. With ``accept_predrawn`` the same as
    ``accept_sampled`` for a tree of chosen children.

    There the token after a node is one draw, and which number it takes is settled by the node's depth. So the tokens of
    all nodes, and of many trees, can be drawn together where the distributions are (``draw_tokens``).
    """
    numbers = randomness.upcoming(1 + max(tree.depths))
    return [numbers[depth] for depth in tree.depths]


def accept_predrawn(tree: DraftTree, tokens: Sequence[int], randomness: SeededRandomness) -> AcceptedPath:
    """``tokens``: what was drawn after each node with ``upcoming_numbers``; those that were needed are used up."""
    accepted = walk(tree, lambda node: check_drawn(tokens[node]))
    randomness.skip(len(accepted.path))
    return accepted


def _token_near_draws(p: FloatArray, drawn: Sequence[int], proposal: Proposal, randomness: Randomness) -> int:
    """A token from p [V], one of ``drawn`` if possible. Uses p up.

    Neither p nor q is ever normalised: scaling q to the mass of p does the same and touches q's support alone.
    """
    ids = proposal.token_ids  # [S]
    q = proposal.probs.astype(np.float64)  # [S], a copy
    for token in drawn:
        here = int(np.flatnonzero(ids == token)[0])
        scaled = q * (p.sum() / max(q.sum(), TINY))  # [S]
        if not scaled[here] > 0.0:
            continue  # q(x) rounded to zero, so x cannot have been drawn: as if it were not there
        if randomness.accept(min(1.0, float(p[token] / scaled[here]))):
            return token
        _subtract(p, ids, scaled)  # p[token] < scaled[here], or it had been accepted: nothing is left of p[token]
        q[here] = 0.0
    return randomness.draw(torch.from_numpy(p))


def _subtract(p: FloatArray, ids: IntArray, scaled: FloatArray) -> None:
    """p <- max(p - q, 0), unless nothing would be left.

    A rejection means p(x) < q(x), so p > q somewhere else. Only if they differ by rounding alone can that be lost; then
    p as it was is as close to the truth as float64 gets.
    """
    before = p[ids]
    p[ids] = np.maximum(before - scaled, 0.0)
    if not p.any():
        p[ids] = before
