"""Exact acceptance: from a tree, the target's word on its nodes and chance to an accepted path."""

from draftwood.verify.base import Accepted
from draftwood.verify.greedy import accept_greedy
from draftwood.verify.sampling import accept_at_once, accept_sampled

__all__ = ["Accepted", "accept_at_once", "accept_greedy", "accept_sampled"]
