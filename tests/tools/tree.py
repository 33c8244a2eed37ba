"""Shared by tests of tree training: slow references of a target and a head, one path at a time, and
the trees that decoding would draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftwood.growth.neural.policies import GrowthOptions, make_growth
from draftwood.heads import Eagle3Head, EagleHead
from draftwood.sources.neural.base import DraftSegment
from draftwood.sources.neural.head import EagleModel
from draftwood.targets.base import Segment, Target, chain_parents
from draftwood.train.base import Batch, Example, Signals
from draftwood.train.methods.gto import copy_frozen
from draftwood.train.trees.draft_trees import DraftBeam
from tests.conftest import threads
from tests.tools.head import GrowingCache, random_head
from tests.tools.train import MODEL, method_for, target_of, train, written_examples

DraftHead = EagleHead | Eagle3Head

both_kinds = pytest.mark.parametrize("kind", ["eagle", "eagle3"])


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


def draft_head(kind: str, seed: int = 0, **changes: Any) -> DraftHead:
    """A random bound head; EAGLE-3 heads have a draft vocabulary."""
    if kind == "eagle3":
        changes = {"draft_vocab_size": 120, **changes}
    head = random_head(kind, MODEL, seed, **changes)
    assert isinstance(head, (EagleHead, Eagle3Head))
    head.bind(target_of().parts())
    return head


def trained_head(kind: str) -> DraftHead:
    """A head that is sometimes right."""
    head = draft_head(kind)
    method = method_for("eagle", head, noise=0.0) if kind == "eagle" else method_for("eagle3", head, steps=3)
    train(method, written_examples(count=2), 15, lr=3e-3)
    return head


def moved(head: DraftHead, scale: float = 0.05) -> DraftHead:
    """A copy with perturbed weights."""
    other = copy_frozen(head)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return other


def target_log_probs(target: Target, tokens: Sequence[int]) -> Tensor:
    """The target's log-probabilities after a text, [V]."""
    sequence = target.open(len(tokens))
    try:
        output = target.forward([Segment(sequence, list(tokens), chain_parents(len(tokens)), 1)])
        return output.logits[0].clone().log_softmax(dim=-1)
    finally:
        target.close(sequence)


def followed(head: DraftHead, text: Sequence[int], taps: Tensor, root: int, path: Sequence[int]) -> Tensor:
    """The head's output after ``path`` below position ``root``, [H]: first the pairs of the text with the target's
    features, then token by token with the head's own. With gradients."""
    cache = GrowingCache()
    features = head.fuse(taps)
    tokens = [*text[1 : root + 1], *path]
    output = torch.empty(0)
    for pair, token in enumerate(tokens):
        feature = features[pair] if pair < root else output
        embed = head.embed(torch.tensor([token]))
        output = head(embed, feature[None], torch.tensor([pair]), cache.attend)[0]
    return output


def read(example: Example, signals: Signals, row: int = 0) -> tuple[list[int], Tensor]:
    """A text and its taps, without padding."""
    size = len(example.token_ids)
    return example.token_ids.tolist(), signals.taps[row, :size]


def decoding_tree(
    head: DraftHead, text: list[int], taps: Tensor, root: int, beam: DraftBeam
) -> tuple[list[int], list[int]]:
    """Tokens and parents of the tree that decoding drafts."""
    model = EagleModel(head, head.config.taps_for(MODEL.num_layers), 256)
    growth = make_growth("beam", -1, beam.nodes, GrowthOptions(depth=beam.depth, top_k=beam.width))
    sequence = model.open(128)
    assert sequence is not None
    num_run = 0
    while (frontier := growth.frontier()) is not None:
        if frontier.parents == [-1]:
            segment = Segment(sequence, text[1 : root + 1], chain_parents(root), 1)
            top = model.forward([DraftSegment(segment, taps[:root])], beam.width)
            model.keep(sequence, range(root))
        else:
            above = [parent - 1 for parent in frontier.parents]
            segment = Segment(sequence, frontier.tokens, above, len(above), num_run)
            top = model.forward([DraftSegment(segment)], beam.width)
            num_run += len(above)
        growth.grow(top.ids, top.probs())
    tree = growth.tree()
    return list(tree.tokens), list(tree.parents)


def paths_of(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths)


def path_to(parents: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], depth: int, node: int) -> list[int]:
    """The tokens of the path to a node of row ``depth`` (from 0) of a tree in rows."""
    path: list[int] = []
    for row in range(depth, -1, -1):
        path.append(tokens[row][node])
        node = parents[row][node]
    return path[::-1]


def batch_and_signals(examples: Sequence[Example], frozen: Any) -> tuple[Batch, Signals]:
    batch = Batch.of(examples)
    return batch, frozen.signals(batch)
