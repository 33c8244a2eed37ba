"""Tests at construction, with a few tokens, whether a model computes trees exactly.

The probe commits a short prefix, runs a small branching tree on it, keeps one path and runs one more token: all steps
of a real cycle. The logits of each node must equal those of its path run as plain text through the bare model without a
cache. That takes four forwards of at most 24 positions, and needs no list of supported models.
"""

from typing import Any

import torch

from draftwood.targets.base import Segment, Target, chain_parents

_PREFIX = 4
_PARENTS = (-1, 0, 0, 1, 2, 2)  # two branches, all leaves equally deep so that the references form one batch
_PATHS = ((0, 1, 3), (0, 2, 4), (0, 2, 5))
_CAPACITY = _PREFIX + len(_PARENTS)

PROBE_WINDOW = 3  # shorter than any path, so that windows matter

# Allowed error of a node's logits relative to their spread. A wrong mask gives errors near 1 in a trained model.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8, torch.float16: 0.03, torch.bfloat16: 0.1}


def find_tree_mismatch(target: Target, model: Any, vocab_size: int) -> str | None:
    """Describe how the trees of this target differ from plain text; None if they are exact."""
    tokens = [(7 * i + 3) % vocab_size for i in range(_PREFIX + len(_PARENTS) + 1)]
    prefix, tree, extra = tokens[:_PREFIX], tokens[_PREFIX:-1], tokens[-1]
    reference = compute_plain_logits(model, [[*prefix, *(tree[node] for node in path), extra] for path in _PATHS])
    sequence = target.open(_CAPACITY)
    try:
        target.forward([Segment(sequence, prefix, chain_parents(_PREFIX), 0)])
        target.keep(sequence, range(_PREFIX))
        branches = target.forward([Segment(sequence, tree, _PARENTS, len(tree))]).logits
        target.keep(sequence, _PATHS[-1])
        after = target.forward([Segment(sequence, [extra], [-1], 1)]).logits
    finally:
        target.close(sequence)
    if branches.shape != (len(tree), reference.shape[-1]):
        return f"logits of shape {tuple(branches.shape)} came back for a tree of {len(tree)} nodes"
    pairs = [
        (branches[node], reference[p, _PREFIX + d]) for p, path in enumerate(_PATHS) for d, node in enumerate(path)
    ]
    return find_mismatch([*pairs, (after[0], reference[-1, -1])], model.dtype)


def compute_plain_logits(model: Any, texts: list[list[int]]) -> torch.Tensor:
    """Logits ``[texts, length, V]`` of texts of equal length, from the bare model."""
    with torch.no_grad():
        output = model(input_ids=torch.tensor(texts, device=model.device), use_cache=False, return_dict=True)
    return output.logits.float()  # type: ignore[no-any-return]


def find_mismatch(pairs: list[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> str | None:
    """Describe the largest error among pairs of logits (ours, reference); None if all are within the tolerance."""
    errors = [((ours - theirs).norm() / (theirs - theirs.mean()).norm()).item() for ours, theirs in pairs]
    allowed = _TOLERANCE.get(dtype, 0.1)
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        allowed = _TOLERANCE[torch.float16]  # the user allowed float32 products with 10-bit mantissas
    # Written so that NaN counts as a mismatch.
    if all(error <= allowed for error in errors):
        return None
    return f"logits of tree nodes differ from those of the plain text by {max(errors):.2g} of their spread"
