"""Exact verification: from a tree, the target's predictions and random numbers to an accepted path."""

from draftwood.verify.base import AcceptedPath, accept_greedy, walk
from draftwood.verify.sampling import accept_predrawn, accept_sampled, upcoming_numbers
