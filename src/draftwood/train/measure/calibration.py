"""Accuracy and calibration of a head off the greedy path: after its own n-th ranked token.

At a position of a text the head predicts its top tokens. After each of them, whatever the target's own choice is, the
next predictions of head and target are compared. A head that was trained only on the target's tokens is good after its
first choice and worse after the others, which are most of a draft tree.

Positions are roots of draft trees and the top tokens their children, so many texts run at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwood.heads import HeadModule, HydraHead, MedusaHead
from draftwood.progress import Progress, report
from draftwood.targets import Target
from draftwood.train.attention import UnrolledAttention
from draftwood.train.base import Batch, Example, Signals
from draftwood.train.frozen import FrozenTarget
from draftwood.train.losses import calibration_error
from draftwood.train.trees import DraftHead, DraftTrees, HeadRun, padded, split_blocks, texts_of, verify_trees

RANKS = 5
MAX_ROWS = 1 << 14  # positions (with padding) and children that run at once


class Rooted(NamedTuple):
    """A text and its root positions."""

    text: Example
    roots: list[int]  # ascending, 1 or more


class ChildPredictions(NamedTuple):
    """Predictions of the head after each of its k children at N roots."""

    right: Tensor  # [N, k] bool: its top-1 token is the target's
    confidence: Tensor  # [N, k] float32: its probability of its top-1 token
    target_prob: Tensor  # [N, k] float32: its probability of the target's token; 0 if not in the draft vocabulary


@torch.no_grad()
def measure_ranks(
    head: HeadModule, target: Target, texts: Sequence[Example], positions: int, progress: Progress | None = None
) -> dict[str, Any]:
    """Measure top-1 accuracy on the texts, then accuracy and calibration after the head's tokens of rank 1 to 5.

    ``head`` is bound to the target and has its dtype. ``positions`` per text are spread evenly over the generated
    tokens. For a head that predicts a single token ``ranks`` is empty.
    """
    frozen = FrozenTarget.of(target, head)
    rooted = [Rooted(text, roots) for text in texts if (roots := choose_roots(text, positions))]
    found, done = [], 0
    for some in _group_texts(rooted, positions):
        report(progress, "measuring calibration", done, len(rooted))
        found.append(_measure_group(head, frozen, some))
        done += len(some)
    if not found:
        return {"accuracy": 0.0, "ranks": []}
    first = torch.cat([right for right, _ in found])  # [N]
    below = ChildPredictions(*(torch.cat(part).cpu() for part in zip(*(own for _, own in found), strict=True)))
    ranks = [{"rank": rank + 1, **_summarise(below, rank)} for rank in range(below.right.shape[1])]
    return {"accuracy": _mean(first), "ranks": ranks}


def choose_roots(text: Example, positions: int) -> list[int]:
    """Choose at most ``positions`` roots whose next token the target generated. Position 0 cannot be a root."""
    written = np.flatnonzero(text.answered[2:]) + 1
    if not len(written):
        return []
    spread = np.linspace(0, len(written) - 1, positions).round().astype(int)
    return sorted({int(written[index]) for index in spread})


def _group_texts(rooted: Sequence[Rooted], positions: int) -> Iterator[list[Rooted]]:
    """Group texts of similar lengths."""
    waiting = sorted(rooted, key=lambda each: -len(each.text.token_ids))
    while waiting:
        longest = len(waiting[0].text.token_ids)
        size = max(1, MAX_ROWS // (longest + RANKS * min(positions, longest)))
        yield waiting[:size]
        waiting = waiting[size:]


def _measure_group(head: HeadModule, frozen: FrozenTarget, rooted: Sequence[Rooted]) -> tuple[Tensor, ChildPredictions]:
    """Return whether the head's top-1 token is right at N roots [N], and the predictions after its children."""
    device = frozen.target.info.device
    batch = Batch.of([each.text for each in rooted], device)
    rows = [each.roots for each in rooted]
    roots, is_root = padded(rows, 1, device)  # [B, R]
    runner = _make_runner(head, batch, frozen.signals(batch), roots)
    path = batch.token_ids.gather(1, roots)[..., None, None]  # [B, R, 1, 1]
    tokens = _best_tokens(head, runner, path)  # [B, R, k]
    (said,) = verify_trees(frozen.target, texts_of(batch), rows, [_make_trees(tokens)])
    choices = said.choices[is_root]  # [N, 1 + k]
    first = tokens[is_root][:, 0] == choices[:, 0]
    if head.config.num_heads_ahead == 1:
        return first, ChildPredictions(*[torch.empty(len(first), 0)] * 3)
    paths = torch.cat([path.expand(*tokens.shape, 1), tokens[..., None]], dim=-1)  # [B, R, k, 2]
    return first, _evaluate_children(head, runner, paths, is_root, choices[:, 1:])


def _best_tokens(head: HeadModule, runner: _Runner, paths: Tensor) -> Tensor:
    """Return the top-k tokens after the roots ``paths [B, R, 1, 1]``: [B, R, k], best first."""
    size = head.config.draft_vocab_size
    states, each_path = runner.states(paths).flatten(0, 2), paths.flatten(0, 2)
    found = []
    for rows, path in zip(split_blocks(states, size), split_blocks(each_path, size), strict=True):
        best = runner.logits(rows, path).topk(min(RANKS, size)).indices  # [n, k]
        found.append(head.target_ids(best))
    return torch.cat(found).view(*paths.shape[:2], -1)


def _make_trees(tokens: Tensor) -> DraftTrees:
    """Build trees of roots and their children ``tokens [B, R, k]``."""
    is_child = torch.ones_like(tokens)
    depths = torch.cat([torch.zeros_like(tokens[..., :1]), is_child], dim=-1)
    return DraftTrees(torch.cat([-is_child[..., :1], tokens], dim=-1), torch.zeros_like(depths), depths)


def _evaluate_children(
    head: HeadModule, runner: _Runner, paths: Tensor, is_root: Tensor, choices: Tensor
) -> ChildPredictions:
    """Evaluate the head after children ``paths [B, R, k, 2]`` against the target's ``choices [N, k]``."""
    size = head.config.draft_vocab_size
    given = runner.states(paths)[is_root], paths[is_root], choices[..., None]  # [N, k, H], [N, k, 2], [N, k, 1]
    found = []
    for rows, path, choice in zip(*(split_blocks(each.flatten(0, 1), size) for each in given), strict=True):
        logits = runner.logits(rows, path)  # [n, Vd]
        best, own = logits.max(dim=-1, keepdim=True)  # [n, 1]
        total = logits.logsumexp(dim=-1, keepdim=True)
        wanted = head.draft_ids(choice)  # -1: not in the draft vocabulary
        prob = (logits.gather(1, wanted.clamp_min(0)) - total).exp()
        found.append(ChildPredictions(own == wanted, (best - total).exp(), torch.where(wanted >= 0, prob, 0.0)))
    return ChildPredictions(*(torch.cat(part).view_as(choices) for part in zip(*found, strict=True)))


def _summarise(below: ChildPredictions, rank: int) -> dict[str, Any]:
    right, confidence, target_prob = (each[:, rank] for each in below)
    return {
        "accuracy": _mean(right),
        "ece": float(calibration_error(confidence.double(), right)),
        # As in the TALF paper: confidence in the target's token instead of the head's own.
        "ece_target": float(calibration_error(target_prob.double(), right)),
        "count": len(right),
    }


def _mean(right: Tensor) -> float:
    return int(right.sum()) / len(right)


class _Runner(ABC):
    """Runs a head at roots, then at their children. ``paths``: the tokens from the root to a node."""

    @abstractmethod
    def states(self, paths: Tensor) -> Tensor:
        """Return the head's states at nodes ``paths [B, R, k, d]`` of depth d - 1, [B, R, k, H]."""

    @abstractmethod
    def logits(self, states: Tensor, paths: Tensor) -> Tensor:
        """Return logits [n, Vd] (float32) from ``states [n, H]`` and ``paths [n, d]``."""


class _EagleRunner(_Runner):
    """EAGLE and EAGLE-3: one pass of the head per depth."""

    def __init__(self, head: DraftHead, batch: Batch, signals: Signals, roots: Tensor) -> None:
        self._head = head
        self._run = HeadRun(head, batch, signals, roots)

    def states(self, paths: Tensor) -> Tensor:
        if paths.shape[3] == 1:
            return self._run.at_roots()
        tokens = paths[..., -1]
        return self._run.step(tokens, torch.zeros_like(tokens))

    def logits(self, states: Tensor, paths: Tensor) -> Tensor:
        return self._head.logits(states)


class _AheadRunner(_Runner):
    """Medusa and Hydra: all depths read the state before the root; Hydra also reads the tokens of the path."""

    def __init__(self, head: MedusaHead | HydraHead, batch: Batch, signals: Signals, roots: Tensor) -> None:
        self._head = head
        features = head.fuse(signals.taps.to(next(head.parameters()).dtype))  # [B, L, H]
        hidden = head(features, batch.positions(), UnrolledAttention().attend(0))
        self._hidden = torch.take_along_dim(hidden, roots[..., None] - 1, dim=1)  # [B, R, H]

    def states(self, paths: Tensor) -> Tensor:
        return self._hidden[:, :, None].expand(-1, -1, paths.shape[2], -1)

    def logits(self, states: Tensor, paths: Tensor) -> Tensor:
        return self._head.logits_at(paths.shape[1], states, self._head.embed(paths).to(states.dtype))


def _make_runner(head: HeadModule, batch: Batch, signals: Signals, roots: Tensor) -> _Runner:
    if isinstance(head, (MedusaHead, HydraHead)):
        return _AheadRunner(head, batch, signals, roots)
    return _EagleRunner(head, batch, signals, roots)
