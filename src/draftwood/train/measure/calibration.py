"""How good a head is beside the greedy path: what it says below its own n-th best guess, and how sure it is of it.

At a place of a text the head names its best guesses for the next token. Each of them is put there in turn, whatever the
target would have said; head and target then both say what follows it. A head that has only ever seen the target's own
words does well below its first guess and worse below the others, which are most of a draft tree.

Positions are roots of draft trees, and the guesses are their children: all those of many texts go together.
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
from draftwood.train.trees import DraftHead, DraftTrees, HeadRun, blocks_of, padded, texts_of, verify_trees

RANKS = 5
MOST_ROWS = 1 << 14  # positions of texts, padding included, and guesses below them that go together


class Rooted(NamedTuple):
    """A text and where it is looked at."""

    text: Example
    roots: list[int]  # ascending, 1 or more


class Below(NamedTuple):
    """What the head says behind each of its k guesses at N places."""

    right: Tensor  # [N, k] bool: its likeliest token is what the target says there
    confidence: Tensor  # [N, k] float32: its probability of its own likeliest token
    target_prob: Tensor  # [N, k] float32: its probability of what the target says; 0 where it has no such token


@torch.no_grad()
def measure_ranks(
    head: HeadModule, target: Target, texts: Sequence[Example], positions: int, progress: Progress | None = None
) -> dict[str, Any]:
    """Top-1 accuracy on the texts, then accuracy and calibration below the head's guesses of rank 1 to 5.

    ``head`` is bound to the target and has its type. ``positions`` of each text are looked at, evenly spread over what
    the target wrote. Below the guesses of a head that sees one token ahead there is nothing to measure.
    """
    frozen = FrozenTarget.of(target, head)
    rooted = [Rooted(text, roots) for text in texts if (roots := choose_roots(text, positions))]
    found, done = [], 0
    for some in _together(rooted, positions):
        report(progress, "looking below guesses", done, len(rooted))
        found.append(_look(head, frozen, some))
        done += len(some)
    if not found:
        return {"accuracy": 0.0, "ranks": []}
    first = torch.cat([right for right, _ in found])  # [N]
    below = Below(*(torch.cat(part).cpu() for part in zip(*(own for _, own in found), strict=True)))
    ranks = [{"rank": rank + 1, **_summary(below, rank)} for rank in range(below.right.shape[1])]
    return {"accuracy": _share(first), "ranks": ranks}


def choose_roots(text: Example, positions: int) -> list[int]:
    """At most so many places whose next token the target wrote. A head reads what is before a root, so 0 is none."""
    written = np.flatnonzero(text.answered[2:]) + 1
    if not len(written):
        return []
    spread = np.linspace(0, len(written) - 1, positions).round().astype(int)
    return sorted({int(written[index]) for index in spread})


def _together(rooted: Sequence[Rooted], positions: int) -> Iterator[list[Rooted]]:
    """Texts of similar lengths."""
    waiting = sorted(rooted, key=lambda each: -len(each.text.token_ids))
    while waiting:
        longest = len(waiting[0].text.token_ids)
        size = max(1, MOST_ROWS // (longest + RANKS * min(positions, longest)))
        yield waiting[:size]
        waiting = waiting[size:]


def _look(head: HeadModule, frozen: FrozenTarget, rooted: Sequence[Rooted]) -> tuple[Tensor, Below]:
    """At N places: whether the head's best guess is right [N], and what is below its guesses."""
    device = frozen.target.info.device
    batch = Batch.of([each.text for each in rooted], device)
    rows = [each.roots for each in rooted]
    roots, is_root = padded(rows, 1, device)  # [B, R]
    asked = _asked(head, batch, frozen.signals(batch), roots)
    path = batch.token_ids.gather(1, roots)[..., None, None]  # [B, R, 1, 1]
    tokens = _best_tokens(head, asked, path)  # [B, R, k]
    (said,) = verify_trees(frozen.target, texts_of(batch), rows, [_trees(tokens)])
    choices = said.choices[is_root]  # [N, 1 + k]
    first = tokens[is_root][:, 0] == choices[:, 0]
    if head.config.num_heads_ahead == 1:
        return first, Below(*[torch.empty(len(first), 0)] * 3)
    paths = torch.cat([path.expand(*tokens.shape, 1), tokens[..., None]], dim=-1)  # [B, R, k, 2]
    return first, _below(head, asked, paths, is_root, choices[:, 1:])


def _best_tokens(head: HeadModule, asked: _Asked, paths: Tensor) -> Tensor:
    """The best guesses behind the roots, the only nodes of ``paths [B, R, 1, 1]``: [B, R, k], best first."""
    size = head.config.draft_vocab_size
    states, each_path = asked.states(paths).flatten(0, 2), paths.flatten(0, 2)
    found = []
    for rows, path in zip(blocks_of(states, size), blocks_of(each_path, size), strict=True):
        best = asked.logits(rows, path).topk(min(RANKS, size)).indices  # [n, k]
        found.append(head.target_ids(best))
    return torch.cat(found).view(*paths.shape[:2], -1)


def _trees(tokens: Tensor) -> DraftTrees:
    """Roots and their children ``tokens [B, R, k]``."""
    is_child = torch.ones_like(tokens)
    depths = torch.cat([torch.zeros_like(tokens[..., :1]), is_child], dim=-1)
    return DraftTrees(torch.cat([-is_child[..., :1], tokens], dim=-1), torch.zeros_like(depths), depths)


def _below(head: HeadModule, asked: _Asked, paths: Tensor, is_root: Tensor, choices: Tensor) -> Below:
    """Of children ``paths [B, R, k, 2]``, and what the target says behind them, ``choices [N, k]``."""
    size = head.config.draft_vocab_size
    given = asked.states(paths)[is_root], paths[is_root], choices[..., None]  # [N, k, H], [N, k, 2], [N, k, 1]
    found = []
    for rows, path, choice in zip(*(blocks_of(each.flatten(0, 1), size) for each in given), strict=True):
        logits = asked.logits(rows, path)  # [n, Vd]
        best, own = logits.max(dim=-1, keepdim=True)  # [n, 1]
        total = logits.logsumexp(dim=-1, keepdim=True)
        wanted = head.draft_ids(choice)  # -1: not in its vocabulary
        prob = (logits.gather(1, wanted.clamp_min(0)) - total).exp()
        found.append(Below(own == wanted, (best - total).exp(), torch.where(wanted >= 0, prob, 0.0)))
    return Below(*(torch.cat(part).view_as(choices) for part in zip(*found, strict=True)))


def _summary(below: Below, rank: int) -> dict[str, Any]:
    right, confidence, target_prob = (each[:, rank] for each in below)
    return {
        "accuracy": _share(right),
        "ece": float(calibration_error(confidence.double(), right)),
        # As the TALF paper has it: sure of what the target says, not of what the head itself would say.
        "ece_target": float(calibration_error(target_prob.double(), right)),
        "count": len(right),
    }


def _share(right: Tensor) -> float:
    return int(right.sum()) / len(right)


class _Asked(ABC):
    """A head at the roots of texts, then at their children. ``paths``: the tokens from the root to a node."""

    @abstractmethod
    def states(self, paths: Tensor) -> Tensor:
        """What the head has computed at nodes ``paths [B, R, k, d]`` of depth d - 1, [B, R, k, H]."""

    @abstractmethod
    def logits(self, states: Tensor, paths: Tensor) -> Tensor:
        """What it says behind some of them, from ``states [n, H]`` and ``paths [n, d]``: [n, Vd] float32."""


class _Eagle(_Asked):
    """EAGLE and EAGLE-3: a pass of the head for every depth."""

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


class _Ahead(_Asked):
    """Medusa and Hydra: all depths read what the head has before the root, and Hydra the tokens of the path."""

    def __init__(self, head: MedusaHead | HydraHead, batch: Batch, signals: Signals, roots: Tensor) -> None:
        self._head = head
        features = head.fuse(signals.taps.to(next(head.parameters()).dtype))  # [B, L, H]
        hidden = head(features, batch.positions(), UnrolledAttention().attend(0))
        self._hidden = torch.take_along_dim(hidden, roots[..., None] - 1, dim=1)  # [B, R, H]

    def states(self, paths: Tensor) -> Tensor:
        return self._hidden[:, :, None].expand(-1, -1, paths.shape[2], -1)

    def logits(self, states: Tensor, paths: Tensor) -> Tensor:
        return self._head.logits_at(paths.shape[1], states, self._head.embed(paths).to(states.dtype))


def _asked(head: HeadModule, batch: Batch, signals: Signals, roots: Tensor) -> _Asked:
    if isinstance(head, (MedusaHead, HydraHead)):
        return _Ahead(head, batch, signals, roots)
    return _Eagle(head, batch, signals, roots)
