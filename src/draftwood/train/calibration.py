"""How good a head is beside the greedy path: what it says below its own n-th best guess, and how sure it is of it.

At a place of a text the head names its best guesses for the next token. Each of them is put there in turn, whatever the
target would have said; head and target then both say what follows it. A head that has only ever seen the target's own
words does well below its first guess and worse below the others, which are most of a draft tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from draftwood.heads import HeadModule, HydraHead, MedusaHead
from draftwood.sources.head import AheadModel, EagleModel, HeadModel
from draftwood.sources.neural import DraftSegment
from draftwood.target.base import Segment, Target, chain_parents
from draftwood.target.toprows import KERNEL_MOST, TopRows
from draftwood.train.base import Batch, Example
from draftwood.train.frozen import FrozenTarget, groups_within
from draftwood.train.losses import calibration_error

RANKS = 5
BINS = 15
TOGETHER = 8  # texts in a pass
_ROOM = RANKS + 1  # nodes below a text


class Guess(NamedTuple):
    """What the head said where the target said ``choice``."""

    right: bool
    confidence: float  # in its own likeliest token
    target_prob: float  # in the target's; 0 where it is not among the head's 64 best


def measure_ranks(head: HeadModule, target: Target, texts: Sequence[Example], positions: int) -> dict[str, Any]:
    """Top-1 accuracy on the texts, then accuracy and calibration below the head's guesses of rank 1 to 5.

    ``head`` is bound to the target and has its type. ``positions`` of each text are looked at, evenly spread over what
    the target wrote.
    """
    frozen = FrozenTarget.of(target, head)
    first: list[Guess] = []
    below: list[list[Guess]] = [[] for _ in range(RANKS)]
    rooms = [len(text.token_ids) + _ROOM for text in texts]
    groups = groups_within(rooms, target.num_slots)
    for some in (group[start : start + TOGETHER] for group in groups for start in range(0, len(group), TOGETHER)):
        probe = _Probe(head, frozen, [texts[index] for index in some], positions)
        try:
            for _ in range(positions):
                probe.advance(first, below)
        finally:
            probe.close()
    ranks = [{"rank": rank, **_summary(guesses)} for rank, guesses in enumerate(below, start=1) if guesses]
    return {"accuracy": _summary(first)["accuracy"] if first else 0.0, "ranks": ranks}


def _summary(guesses: Sequence[Guess]) -> dict[str, Any]:
    right = [guess.right for guess in guesses]
    return {
        "accuracy": sum(right) / len(right),
        "ece": expected_calibration_error([guess.confidence for guess in guesses], right),
        # As the TALF paper has it: sure of what the target says, not of what the head itself would say.
        "ece_target": expected_calibration_error([guess.target_prob for guess in guesses], right),
        "count": len(right),
    }


def expected_calibration_error(confidences: Sequence[float], right: Sequence[bool]) -> float:
    """How far confidence and share of right guesses are apart, in the mean over bins of equal width (Guo et al.)."""
    sure, hits = torch.tensor(confidences, dtype=torch.float64), torch.tensor(right, dtype=torch.bool)
    return float(calibration_error(sure, hits, BINS))


class _Text:
    """One text under way: how far head and target have read it."""

    def __init__(self, example: Example, taps: torch.Tensor, positions: int) -> None:
        self.ids: list[int] = example.token_ids.tolist()
        self.taps = taps  # [n, T*H]
        written = np.flatnonzero(example.answered[1:])  # places whose next token the target wrote
        written = written[written >= 1]  # a head reads what is before the root
        spread = np.linspace(0, len(written) - 1, positions).round().astype(int) if len(written) else []
        self.roots: list[int] = sorted({int(written[index]) for index in spread}, reverse=True)  # the next one last
        self.read = 1  # tokens that the head has read; the first has nothing before it
        self.committed = 0  # tokens that the target has


class _Probe:
    """Several texts side by side, one place of each after the other."""

    def __init__(self, head: HeadModule, frozen: FrozenTarget, texts: Sequence[Example], positions: int) -> None:
        self._target = frozen.target
        device = self._target.info.device
        taps = frozen.signals(Batch.of(texts, device)).taps
        self._texts = [
            _Text(text, own[: len(text.token_ids)], positions) for text, own in zip(texts, taps, strict=True)
        ]
        rooms = [len(text.ids) + _ROOM for text in self._texts]
        self._model = _model(head, self._target.info.num_layers, sum(rooms))
        self._sequences = [self._target.open(room) for room in rooms]
        self._drafts = [self._model.open(room) for room in rooms]

    def close(self) -> None:
        for sequence in self._sequences:
            self._target.close(sequence)

    def advance(self, first: list[Guess], below: list[list[Guess]]) -> None:
        """To the next place of every text that has one."""
        chosen = [index for index, text in enumerate(self._texts) if text.roots]
        if not chosen:
            return
        roots = {index: self._texts[index].roots.pop() for index in chosen}
        said = self._read(roots)  # behind every root
        children = {index: said.ids[row, :RANKS].tolist() for row, index in enumerate(chosen)}
        deeper = self._guess(children)
        choices = self._choices(roots, children)
        probs, deeper_probs = said.probs(), deeper.probs()
        row = 0
        for place, index in enumerate(chosen):
            first.append(_guess(said.ids[place], probs[place], choices[index][0]))
            for rank in range(len(children[index])):
                below[rank].append(_guess(deeper.ids[row], deeper_probs[row], choices[index][1 + rank]))
                row += 1

    def _read(self, roots: dict[int, int]) -> TopRows:
        """Lets the head read up to the roots; what it says behind them."""
        segments = []
        for index, root in roots.items():
            text = self._texts[index]
            tokens = text.ids[text.read : root + 1]
            segment = Segment(self._draft(index), tokens, chain_parents(len(tokens)), 1)
            segments.append(DraftSegment(segment, text.taps[text.read - 1 : root]))
            text.read = root + 1
        top = self._model.forward(segments, KERNEL_MOST)
        for segment, _ in segments:
            self._model.keep(segment.sequence, range(len(segment.token_ids)))
        return top

    def _guess(self, children: dict[int, list[int]]) -> TopRows:
        """What it says behind each of its own guesses."""
        segments = [
            DraftSegment(Segment(self._draft(index), tokens, [-1] * len(tokens), len(tokens)))
            for index, tokens in children.items()
        ]
        return self._model.forward(segments, KERNEL_MOST)

    def _choices(self, roots: dict[int, int], children: dict[int, list[int]]) -> dict[int, list[int]]:
        """What the target says behind the root and behind every child."""
        before = []
        for index, root in roots.items():
            text = self._texts[index]
            if root > text.committed:
                tokens = text.ids[text.committed : root]
                before.append(Segment(self._sequences[index], tokens, chain_parents(len(tokens)), 0))
        if before:
            self._target.forward(before)
            for segment in before:
                self._target.keep(segment.sequence, range(len(segment.token_ids)))
        trees = [
            Segment(
                self._sequences[index], [self._texts[index].ids[root], *below], [-1] + [0] * len(below), 1 + len(below)
            )
            for (index, root), below in zip(roots.items(), children.values(), strict=True)
        ]
        greedy: list[int] = self._target.forward(trees).greedy_ids.tolist()
        choices = {}
        for (index, root), tree in zip(roots.items(), trees, strict=True):
            choices[index], greedy = greedy[: tree.num_logits], greedy[tree.num_logits :]
            self._target.keep(tree.sequence, [0])
            self._texts[index].committed = root + 1
        return choices

    def _draft(self, index: int) -> int:
        sequence = self._drafts[index]
        assert sequence is not None
        return sequence


def _guess(ids: npt.NDArray[np.int32], probs: npt.NDArray[np.float32], choice: int) -> Guess:
    """From the best tokens of a row [k] and their probabilities."""
    among = np.flatnonzero(ids == choice)
    return Guess(int(ids[0]) == choice, float(probs[0]), float(probs[among[0]]) if len(among) else 0.0)


def _model(head: HeadModule, num_layers: int, num_slots: int) -> HeadModel:
    """Without graphs, unlike `sources.head.head_model`: the passes are few, and no two are alike."""
    taps = head.config.taps_for(num_layers)
    if isinstance(head, (MedusaHead, HydraHead)):
        return AheadModel(head, taps, num_slots)
    return EagleModel(head, taps, num_slots)
