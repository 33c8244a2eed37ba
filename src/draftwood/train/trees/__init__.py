"""Trees at positions of training texts: grown by the target or by a head, and verified."""

from draftwood.train.trees.branch import branch_log_probs
from draftwood.train.trees.draft_trees import DraftBeam, DraftTrees, grow_draft_trees
from draftwood.train.trees.grow import grow_trees
from draftwood.train.trees.head_run import DraftHead, HeadRun
from draftwood.train.trees.labels import Labels, find_vocabulary, node_losses
from draftwood.train.trees.layer_run import scatter, split_blocks
from draftwood.train.trees.rewards import (
    REWARDS,
    Branch,
    accepted_branch,
    advantages,
    branch_to,
    clipped,
    ratios,
    reward,
)
from draftwood.train.trees.roots import counted_roots, padded, sample_groups, sample_roots, texts_of
from draftwood.train.trees.store import TreeStore
from draftwood.train.trees.target_trees import Beam, TextTrees, joined
from draftwood.train.trees.verify import VerifiedTree, verify_trees
from draftwood.train.trees.walk import Texts
