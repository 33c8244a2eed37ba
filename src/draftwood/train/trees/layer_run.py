"""Run the target's layers along texts and down trees without its cache: all nodes of many texts at once.

An ordinary pass of the target runs a few trees, which the host packs and waits for. Here the keys and values of a text
are computed once, and every step is a few large matmuls per layer for all trees. Callers disable gradients and autocast
(`as_target`).
"""

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

MAX_ROWS = {"cpu": 1 << 13, "cuda": 1 << 16}  # positions and nodes that run at once
MAX_BYTES = 1 << 28  # their approximate memory; on a GPU see `working_memory`
ALIGNED = 8  # row alignment that GPUs prefer


@contextmanager
def as_target(target: Target) -> Iterator[None]:
    """Run the target in its own precision, whatever precision the head is trained in, without gradients."""
    with torch.no_grad(), torch.autocast(target.info.device.type, enabled=False):
        yield


class TextRun:
    """Runs texts ``token_ids [B, L]``, padded at the end."""

    def __init__(self, layers: Layers, token_ids: Tensor) -> None:
        self.layers = layers
        self.rows: list[Rows] = []  # by layer [B, L, kv_heads, D]
        positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        self.hidden = _run(layers, token_ids, positions, self._attend)  # [B, L, H]

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend causally. Padding is at the end, so no token sees it."""
        self.rows.append((key, value.contiguous()))  # a view of a joint matrix, whose memory is released
        return causal_attention(query, key, value)


class TreeRun:
    """Runs trees at ``roots [B, R]`` of the texts."""

    def __init__(self, text: TextRun, roots: Tensor) -> None:
        self._text = text
        self._roots = roots
        self._nodes: list[list[Rows]] = [[] for _ in text.rows]  # by layer and step [B, R, k, kv_heads, D]
        self.at_roots = torch.take_along_dim(text.hidden, roots[..., None], dim=1)  # [B, R, H]

    def step(self, tokens: Tensor, ancestors: Tensor, is_node: Tensor) -> Tensor:
        """Return the last hidden states ``[n, H]`` of further nodes: ``tokens [B, R, k]`` where ``is_node [B, R, k]``.

        ``ancestors [B, R, k, m]`` are among all nodes so far, including the new ones."""
        where = is_node.flatten().nonzero()[:, 0]  # [n]
        positions = self._roots[..., None] + ancestors.sum(dim=-1)  # [B, R, k]
        attend = partial(self._attend, is_node.shape, where, ancestors)
        return _run(self._text.layers, tokens.flatten()[where], positions.flatten()[where], attend)

    def _attend(
        self, shape: torch.Size, where: Tensor, ancestors: Tensor, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attend: rows of nodes [n, heads, D] are scattered to [B, R, k] meanwhile."""
        query, key, value = (scatter(each, where, shape) for each in (query, key, value))  # [B, R, k, heads, D]
        self._nodes[layer].append((key, value))
        text = self._text.rows[layer]
        spare = 0 if is_fused(query) else -ancestors.shape[-1] % ALIGNED
        nodes = joined(self._nodes[layer], spare)  # [B, R, m, kv_heads, D]
        aligned = F.pad(ancestors, (0, spare)) if spare else ancestors
        mixed = tree_attention(query, text, nodes, self._roots, aligned)
        return mixed.flatten(0, 2)[where]


class Slice(NamedTuple):
    """Some roots of some texts that run at once."""

    run: TreeRun
    texts: list[int]  # [b]
    first: int  # index of the first root in each text
    sizes: list[int]  # [b] number of roots
    roots: Tensor  # [b, R]
    is_root: Tensor  # [b, R] bool


def slices(layers: Layers, texts: Texts, roots: Texts, num_nodes: int) -> Iterator[Slice]:
    """Yield slices of all roots, each with ``num_nodes`` nodes. A text runs once, up to its last root."""
    device = layers.device
    ends = {text: own[-1] + 1 for text, own in enumerate(roots) if own}
    for group, max_rows in _groups(layers, ends, num_nodes):
        token_ids, _ = padded([texts[text][: ends[text]] for text in group], 0, device)
        text_run = TextRun(layers, F.pad(token_ids, (0, -token_ids.shape[1] % ALIGNED)))
        at_once = max(1, max_rows // (len(group) * num_nodes))
        for first in range(0, max(len(roots[text]) for text in group), at_once):
            own = [roots[text][first : first + at_once] for text in group]
            places, is_root = padded(own, 1, device)
            yield Slice(TreeRun(text_run, places), group, first, [len(each) for each in own], places, is_root)


def _groups(layers: Layers, lengths: Mapping[int, int], num_nodes: int) -> Iterator[tuple[list[int], int]]:
    """Group texts of similar lengths. Yield each group with its maximum number of rows."""
    rows, max_bytes = _memory_limits(layers.device)
    group: list[int] = []
    for text in sorted(lengths, key=lambda each: -lengths[each]):
        longest = lengths[group[0] if group else text]
        max_rows = min(rows, max_bytes // _row_bytes(layers, longest + num_nodes))
        if group and (len(group) + 1) * max(longest, num_nodes) > max_rows:
            yield group, max_rows
            group = []
        group.append(text)
    if group:
        yield group, max_rows


def split_blocks(rows: Tensor, vocab_size: int) -> Sequence[Tensor]:
    """Split hidden states into blocks whose logits fit in memory."""
    return torch.split(rows, max(1, max_logits(rows.device) // vocab_size))


def scatter(rows: Tensor, where: Tensor, shape: torch.Size) -> Tensor:
    """Scatter rows [n, ...] to [*shape, ...]; zeros elsewhere."""
    room = rows.new_zeros(shape.numel(), *rows.shape[1:])
    return room.index_copy_(0, where, rows).view(*shape, *rows.shape[1:])


def _run(layers: Layers, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """Return the last hidden states."""
    hidden = token_ids
    for state in layers.states(token_ids, positions, attend):
        hidden = state
    return hidden


def _memory_limits(device: torch.device) -> tuple[int, int]:
    """Return the maximum rows that run at once, and their maximum memory in bytes."""
    rows = MAX_ROWS.get(device.type, MAX_ROWS["cpu"])
    if device.type != "cuda":
        return rows, MAX_BYTES
    return rows, working_memory(device)


def _row_bytes(layers: Layers, num_seen: int) -> int:
    """Estimate the bytes of a row that sees ``num_seen`` keys: scores (unless fused), states, keys and values."""
    config = layers.config
    itemsize = layers.dtype.itemsize
    fused = has_kernel(layers.dtype, config.head_dim, layers.device)
    scores = 0 if fused else 3 * config.num_heads * num_seen * itemsize
    return scores + bytes_per_row(layers) + config.cache_bytes_per_token(itemsize)
