"""The target's layers along texts and down trees, apart from its cache: all nodes of all roots of many texts at once.

A pass of the target itself runs some trees of some texts, which the host packs and waits for. Here a text's keys and
values are computed once, and every step is a handful of large products per layer, whatever hangs off whatever.
Callers see to it that there are no gradients and no autocast (`as_target`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from draftwood.targets import Attend, Layers, Target
from draftwood.train.attention import causal_attention
from draftwood.train.frozen import bytes_per_row, working_memory
from draftwood.train.losses import max_logits
from draftwood.train.trees.attention import Rows, has_kernel, is_fused, joined, tree_attention
from draftwood.train.trees.roots import padded
from draftwood.train.trees.walk import Texts

MOST_ROWS = {"cpu": 1 << 13, "cuda": 1 << 16}  # positions and nodes that are computed together
MOST_BYTES = 1 << 28  # that they take, about; of a GPU a part of what it has
ALIGNED = 8  # rows of products begin where a GPU likes them to


@contextmanager
def as_target(target: Target) -> Iterator[None]:
    """The target computes as it always does, whatever precision a head is trained in."""
    with torch.no_grad(), torch.autocast(target.info.device.type, enabled=False):
        yield


class TextRun:
    """Along texts ``token_ids [B, L]``, padded at the end."""

    def __init__(self, layers: Layers, token_ids: Tensor) -> None:
        self.layers = layers
        self.rows: list[Rows] = []  # by layer [B, L, kv_heads, D]
        positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        self.hidden = _run(layers, token_ids, positions, self._attend)  # [B, L, H]

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Plain causal order; padding comes last and is seen by nobody."""
        self.rows.append((key, value.contiguous()))  # of a joint matrix; nobody needs the rest of it
        return causal_attention(query, key, value)


class TreeRun:
    """From some positions of the texts, ``roots [B, R]``, down trees."""

    def __init__(self, text: TextRun, roots: Tensor) -> None:
        self._text = text
        self._roots = roots
        self._nodes: list[list[Rows]] = [[] for _ in text.rows]  # by layer and step [B, R, k, kv_heads, D]
        self.at_roots = torch.take_along_dim(text.hidden, roots[..., None], dim=1)  # [B, R, H]

    def step(self, tokens: Tensor, ancestors: Tensor, is_node: Tensor) -> Tensor:
        """The last hidden states ``[n, H]`` of further nodes, those that are some, in their order: ``tokens`` and
        ``is_node [B, R, k]``. ``ancestors [B, R, k, m]`` are among all nodes so far, themselves included."""
        where = is_node.flatten().nonzero()[:, 0]  # [n]
        positions = self._roots[..., None] + ancestors.sum(dim=-1)  # [B, R, k]
        attend = partial(self._attend, is_node.shape, where, ancestors)
        return _run(self._text.layers, tokens.flatten()[where], positions.flatten()[where], attend)

    def _attend(
        self, shape: torch.Size, where: Tensor, ancestors: Tensor, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Rows of nodes [n, heads, D]; side by side below their roots meanwhile."""
        query, key, value = (spread(each, where, shape) for each in (query, key, value))  # [B, R, k, heads, D]
        self._nodes[layer].append((key, value))
        text = self._text.rows[layer]
        spare = 0 if is_fused(query) else -ancestors.shape[-1] % ALIGNED
        nodes = joined(self._nodes[layer], spare)  # [B, R, m, kv_heads, D]
        aligned = F.pad(ancestors, (0, spare)) if spare else ancestors
        mixed = tree_attention(query, text, nodes, self._roots, aligned)
        return mixed.flatten(0, 2)[where]


class Slice(NamedTuple):
    """Some roots of some texts: those that are computed together."""

    run: TreeRun
    texts: list[int]  # [b]
    first: int  # of the roots of each text
    sizes: list[int]  # [b] so many from there on
    roots: Tensor  # [b, R]
    is_root: Tensor  # [b, R] bool


def slices(layers: Layers, texts: Texts, roots: Texts, num_nodes: int) -> Iterator[Slice]:
    """All roots of all texts, each of which ``num_nodes`` hang off. A text is run once, up to its last root."""
    device = layers.device
    ends = {text: own[-1] + 1 for text, own in enumerate(roots) if own}
    for group, most_rows in _groups(layers, ends, num_nodes):
        token_ids, _ = padded([texts[text][: ends[text]] for text in group], 0, device)
        text_run = TextRun(layers, F.pad(token_ids, (0, -token_ids.shape[1] % ALIGNED)))
        at_once = max(1, most_rows // (len(group) * num_nodes))
        for first in range(0, max(len(roots[text]) for text in group), at_once):
            own = [roots[text][first : first + at_once] for text in group]
            places, is_root = padded(own, 1, device)
            yield Slice(TreeRun(text_run, places), group, first, [len(each) for each in own], places, is_root)


def _groups(layers: Layers, lengths: Mapping[int, int], num_nodes: int) -> Iterator[tuple[list[int], int]]:
    """Texts of similar lengths, and how many rows may be computed together for them."""
    rows, most_bytes = _room(layers.device)
    group: list[int] = []
    for text in sorted(lengths, key=lambda each: -lengths[each]):
        longest = lengths[group[0] if group else text]
        most_rows = min(rows, most_bytes // _row_bytes(layers, longest + num_nodes))
        if group and (len(group) + 1) * max(longest, num_nodes) > most_rows:
            yield group, most_rows
            group = []
        group.append(text)
    if group:
        yield group, most_rows


def blocks_of(rows: Tensor, vocab_size: int) -> Sequence[Tensor]:
    """Rows of hidden states, as many to a block as may have their logits in memory."""
    return torch.split(rows, max(1, max_logits(rows.device) // vocab_size))


def spread(rows: Tensor, where: Tensor, shape: torch.Size) -> Tensor:
    """Rows [n, ...] at their places of all [*shape, ...]; zeros elsewhere."""
    room = rows.new_zeros(shape.numel(), *rows.shape[1:])
    return room.index_copy_(0, where, rows).view(*shape, *rows.shape[1:])


def _run(layers: Layers, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """The last hidden states."""
    hidden = token_ids
    for state in layers.states(token_ids, positions, attend):
        hidden = state
    return hidden


def _room(device: torch.device) -> tuple[int, int]:
    """Rows that are computed together, and the bytes that they may take."""
    rows = MOST_ROWS.get(device.type, MOST_ROWS["cpu"])
    if device.type != "cuda":
        return rows, MOST_BYTES
    return rows, working_memory(device)


def _row_bytes(layers: Layers, num_seen: int) -> int:
    """Of one row that sees so many: scores, before and behind their sum, if they are held; what a layer holds; keys and
    values of all."""
    config = layers.config
    itemsize = layers.dtype.itemsize
    fused = has_kernel(layers.dtype, config.head_dim, layers.device)
    scores = 0 if fused else 3 * config.num_heads * num_seen * itemsize
    return scores + bytes_per_row(layers) + config.cache_bytes_per_token(itemsize)
