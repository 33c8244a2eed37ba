"""Sampled verification: tokens with exactly the target's distribution that match the tree as often as possible.

At each node the target predicts p. The next token is sampled first; then the walk checks whether a child carries it.

*Chosen* children: the draft distribution is one-hot, so the standard rule accepts x with probability p(x), else removes
x from p, renormalises and tries the next child. All of that equals a single draw from p, and is done as one: one random
number per emitted token, whatever the tree. A seed therefore gives the same output with every drafter that chooses.

*Drawn* children were sampled without replacement from q. Accept x with probability min(1, p(x) / q(x)), else
p <- normalise(max(p - q, 0)), q <- normalise(q without x), and try the next child in the order of the draw. The order
matters, and a drafter must never drop a drawn child because of its token.

*Both*: chosen children first; then p and q without the chosen tokens.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from draftwood.sampling import Randomness, SeededRandomness, check_drawn
from draftwood.tree import DraftTree, FloatArray, IntArray, Proposal
from draftwood.verify.base import AcceptedPath, walk

TINY = float(np.finfo(np.float64).tiny)


def accept_sampled(tree: DraftTree, probs_of: Callable[[int], torch.Tensor], randomness: Randomness) -> AcceptedPath:
    """``probs_of(node)`` [V] is the target's distribution after a node; called for visited nodes only."""

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
        return _verify_drawn(p.numpy(), drawn, proposal, randomness)

    return walk(tree, token_after)


def upcoming_numbers(tree: DraftTree, randomness: SeededRandomness) -> list[float]:
    """The random number that draws the token after each node, if that node is reached.

    For trees of chosen children, the token after a node is one draw, whose number depends only on the node's depth. So
    the tokens of all nodes of many trees can be drawn at once, by the target or with ``draw_tokens``, and be accepted
    like greedy choices (``accept_predrawn``, or its steps in C), with the same result as ``accept_sampled``.
    """
    numbers = randomness.upcoming(1 + max(tree.depths))
    return [numbers[depth] for depth in tree.depths]


def accept_predrawn(tree: DraftTree, tokens: Sequence[int], randomness: SeededRandomness) -> AcceptedPath:
    """``tokens`` were drawn after each node with ``upcoming_numbers``; the numbers of the path are consumed."""
    accepted = walk(tree, lambda node: check_drawn(tokens[node]))
    randomness.skip(len(accepted.path))
    return accepted


def _verify_drawn(p: FloatArray, drawn: Sequence[int], proposal: Proposal, randomness: Randomness) -> int:
    """Sample a token from p [V], one of ``drawn`` if possible. Modifies p.

    Neither p nor q is normalised: scaling q to the mass of p is equivalent and touches only the support of q.
    """
    ids = proposal.token_ids  # [S]
    q = proposal.probs.astype(np.float64)  # [S], a copy
    for token in drawn:
        here = int(np.flatnonzero(ids == token)[0])
        scaled = q * (p.sum() / max(q.sum(), TINY))  # [S]
        if not scaled[here] > 0.0:
            continue  # q(x) rounded to zero, so x cannot have been drawn: ignore it
        if randomness.accept(min(1.0, float(p[token] / scaled[here]))):
            return token
        _subtract(p, ids, scaled)  # a rejection implies p[token] < scaled[here], so p[token] becomes 0
        q[here] = 0.0
    return randomness.draw(torch.from_numpy(p))


def _subtract(p: FloatArray, ids: IntArray, scaled: FloatArray) -> None:
    """p <- max(p - q, 0), unless that leaves nothing.

    A rejection means p(x) < q(x), so p > q somewhere else. This can only fail if p and q differ by rounding; then the
    old p is as accurate as float64 allows.
    """
    before = p[ids]
    p[ids] = np.maximum(before - scaled, 0.0)
    if not p.any():
        p[ids] = before
