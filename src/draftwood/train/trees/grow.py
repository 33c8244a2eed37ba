"""Grow target trees at positions of texts (`target_trees.py`), one depth of all trees at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from draftwood.targets import Layers, Target
from draftwood.train.trees.attention import children_of
from draftwood.train.trees.grow_walk import grow_by_passes
from draftwood.train.trees.labels import Children, Labels, read_labels
from draftwood.train.trees.layer_run import Slice, as_target, scatter, slices, split_blocks
from draftwood.train.trees.target_trees import Beam, TextTrees, by_root, joined, no_trees, packed, select_best
from draftwood.train.trees.walk import Texts


def grow_trees(
    target: Target, texts: Texts, roots: Texts, beam: Beam, vocabulary: Tensor | None = None
) -> list[TextTrees]:
    """Grow trees at the ascending ``roots`` of each text, with tokens of the ``vocabulary`` if given."""
    size = target.info.vocab_size if vocabulary is None else len(vocabulary)
    beam = Beam(min(beam.width, size), beam.depth, min(beam.num_kept, size))
    layers = target.layers()
    with as_target(target):
        if layers is None:
            return grow_by_passes(target, texts, roots, beam, vocabulary)
        return _grow_layers(layers, texts, roots, beam, vocabulary)


def _grow_layers(layers: Layers, texts: Texts, roots: Texts, beam: Beam, vocabulary: Tensor | None) -> list[TextTrees]:
    parts: list[list[TextTrees]] = [[] for _ in texts]
    for each in slices(layers, texts, roots, max(1, beam.width * (beam.depth - 1))):
        for text, trees in zip(each.texts, _grow_slice(layers, each, beam, vocabulary), strict=True):
            parts[text].append(trees)
    return [joined(own) if own else no_trees(beam) for own in parts]


def _grow_slice(layers: Layers, those: Slice, beam: Beam, vocabulary: Tensor | None) -> Iterator[TextTrees]:
    """Grow the trees of a slice with M roots. Yield them text by text."""
    where = those.is_root.flatten().nonzero()[:, 0]  # [M]
    is_node = those.is_root[..., None].expand(-1, -1, beam.width)  # [b, R, k]
    ancestors = torch.zeros(*those.roots.shape, 1, 0, dtype=torch.bool, device=where.device)
    labels, children = _read_labels(layers, those.run.at_roots.flatten(0, 1)[where], beam, vocabulary)
    all_labels = [Labels(*(part[:, None] for part in labels))]  # [M, 1, K]
    tokens, parents, values = select_best(children, torch.zeros_like(children.log_probs[:, :1]), beam.width)
    levels: list[tuple[Tensor, Tensor]] = []
    for _ in range(beam.depth - 1):
        levels.append((tokens, parents))
        own, above = (scatter(each, where, those.roots.shape) for each in (tokens, parents))  # [b, R, k]
        ancestors = children_of(ancestors, above)
        labels, children = _read_labels(layers, those.run.step(own, ancestors, is_node), beam, vocabulary)
        all_labels.append(Labels(*(by_root(part, beam.width) for part in labels)))  # [M, k, K]
        tokens, parents, values = select_best(children, values, beam.width)
    trees = packed(those.roots.flatten()[where], levels, all_labels, beam.width)
    for split in zip(*(torch.split(part, those.sizes) for part in trees), strict=True):
        yield TextTrees(*split)


def _read_labels(layers: Layers, rows: Tensor, beam: Beam, vocabulary: Tensor | None) -> tuple[Labels, Children]:
    """Return labels and children after last hidden states [n, H]."""
    found = [
        read_labels(layers.logits(block), vocabulary, beam.num_kept, beam.width)
        for block in split_blocks(rows, layers.config.vocab_size)
    ]
    labels, children = zip(*found, strict=True)
    return Labels(*map(torch.cat, zip(*labels, strict=True))), Children(*map(torch.cat, zip(*children, strict=True)))
