"""The tree as data: nodes, invariants, layout."""

from draftwood.tree.draft import BYPASS, ROOT_SOURCE, DraftTree, Proposal, TreeBuilder
from draftwood.tree.layout import ancestor_mask, is_chain, positions

__all__ = ["BYPASS", "ROOT_SOURCE", "DraftTree", "Proposal", "TreeBuilder", "ancestor_mask", "is_chain", "positions"]
