"""Exact acceptance: from a tree, the target's word on its nodes and chance to an accepted path."""

from draftwood.verify.base import Accepted, walk
from draftwood.verify.greedy import accept_greedy
from draftwood.verify.sampling import accept_drawn, accept_sampled, numbers_of

__all__ = ["Accepted", "accept_drawn", "accept_greedy", "accept_sampled", "numbers_of", "walk"]
