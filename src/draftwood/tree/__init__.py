"""Draft trees as data: nodes, invariants, layout, shapes."""

from draftwood.tree import theory
from draftwood.tree.draft import BYPASS, DraftTree, FloatArray, IntArray, Proposal, TreeBuilder
from draftwood.tree.layout import ancestor_mask, is_chain, pack_places, positions
from draftwood.tree.packed import ROOT_SOURCE, SOURCE_NUMBERS, Forest
from draftwood.tree.shapes import TreeShape, chain_tree, initial_tree, prune, ranked_tree, recycling_tree
from draftwood.tree.theory import SpinePlan, sequoia
