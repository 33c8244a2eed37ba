"""Beam search of a feature decoder without the host: after a pass, a kernel picks the nodes of the next one.

The passes of a beam follow each other in one launch. Pass 0 reads text and predicts what follows each sequence's last
token, its root. Between two passes one program per sequence values the candidates that the last pass predicted, picks
the best of them, and writes the inputs of the next pass over them. The host reads all candidates at the end.

targets/beams.py numbers nodes and candidates. The value of a candidate is the probability of its path. Picks are by
value, then by number.
"""

# ruff: noqa: N803 - compile-time values are in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import numpy as np
import torch
import triton
import triton.language as tl

from draftwood.targets.beams import Beam, BeamPlan
from draftwood.targets.native.cuda.attention import TILE_FIELDS, WORD_BITS
from draftwood.targets.native.cuda.features.passes import FeaturePass
from draftwood.targets.native.cuda.inputs import NO_SLOT

WARPS = 4
NOT_PICKED = -1
BITS = tl.constexpr(WORD_BITS)
FIELDS = tl.constexpr(TILE_FIELDS)
NOWHERE = tl.constexpr(NO_SLOT)


@triton.jit
def _pick(
    words, wanted, root_slots, root_positions, count, vocabulary,
    tokens, probs, paths, picks, values, ancestors,
    ids, positions, slots, afters, sources, tiles, row_words, turn,
    WIDTH: tl.constexpr, BEST: tl.constexpr, STRIDE: tl.constexpr, NODES: tl.constexpr, WORDS: tl.constexpr,
    ROW_WORDS: tl.constexpr, PER_TILE: tl.constexpr, TILES: tl.constexpr,
    SELECTED: tl.constexpr, MAPPED: tl.constexpr, LAST: tl.constexpr,
    LANES: tl.constexpr, PLACES: tl.constexpr, WORD_LANES: tl.constexpr, TILE_LANES: tl.constexpr,
):  # fmt: skip
    """Value the candidates after the nodes of pass ``turn - 1``, whose top entries are ``words [rows, STRIDE]``, and
    write pass ``turn`` over the best of them."""
    sequence = tl.program_id(0)
    used = sequence < tl.load(count)
    root_row = tl.load(wanted + sequence, mask=used, other=0)
    first = (turn - 1) * WIDTH  # node of the last pass; also the number of nodes below the root that were run

    # The candidates of the last pass, a lane each.
    lane = tl.arange(0, LANES)
    rank = lane % BEST
    there = used & (lane // BEST < tl.where(turn == 1, 1, WIDTH))
    row = tl.where(turn == 1, sequence if SELECTED else root_row, sequence * WIDTH + lane // BEST)
    entry = words + row * STRIDE
    token = tl.load(entry + rank, mask=there, other=0)
    logit = tl.load(entry + STRIDE // 2 + rank, mask=there, other=0).to(tl.float32, bitcast=True)
    total = tl.load(entry + STRIDE - 1, mask=there, other=0).to(tl.float32, bitcast=True)
    value = tl.load(values + sequence * NODES + first + lane // BEST, mask=there, other=0.0)
    prob = tl.where(value > 0.0, tl.minimum(tl.exp(logit - total), 1.0), 0.0)
    value = value * prob
    out = sequence * (NODES * BEST) + first * BEST + lane
    tl.store(tokens + out, token, mask=lane < WIDTH * BEST)
    tl.store(probs + out, prob, mask=lane < WIDTH * BEST)
    tl.store(paths + out, value, mask=lane < WIDTH * BEST)
    if LAST:
        return

    # The best of them, one after the other: positive floats sort like their bits, of equal ones the first is best.
    place = tl.arange(0, PLACES)
    chosen = tl.full([PLACES], 0, tl.int32)  # lane
    chosen_token = tl.full([PLACES], 0, tl.int32)
    chosen_value = tl.full([PLACES], 0.0, tl.float32)
    keys = (value.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (LANES - 1 - lane).to(tl.int64)
    keys = tl.where(value > 0.0, keys, 0)
    for number in range(WIDTH):
        best = tl.max(keys, axis=0)
        at = LANES - 1 - (best & 0x7FFFFFFF).to(tl.int32)
        is_pick = (place == number) & (best > 0)
        chosen = tl.where(is_pick, at, chosen)
        chosen_token = tl.where(is_pick, tl.sum(tl.where(lane == at, token, 0), axis=0), chosen_token)
        chosen_value = tl.where(is_pick, (best >> 32).to(tl.int32).to(tl.float32, bitcast=True), chosen_value)
        keys = tl.where(lane == at, 0, keys)

    # Missing nodes run like others, as children of the root, but nothing follows them.
    is_node = place < WIDTH
    is_found = chosen_value > 0.0
    has_parent = is_found & (turn > 1)  # a parent below the root
    parent = tl.where(is_found, first + chosen // BEST, 0)
    node = sequence * NODES + turn * WIDTH + place
    tl.store(picks + node, tl.where(is_found, first * BEST + chosen, -1), mask=is_node)
    tl.store(values + node, chosen_value, mask=is_node)
    root_slot = tl.load(root_slots + root_row, mask=used, other=0)
    root_position = tl.load(root_positions + root_row, mask=used, other=0)
    rows = sequence * WIDTH + place
    if MAPPED:
        chosen_token = tl.load(vocabulary + chosen_token, mask=is_node, other=0).to(tl.int32)
    tl.store(ids + rows, chosen_token, mask=is_node)
    tl.store(positions + rows, tl.where(used, root_position + turn, 0), mask=is_node)
    tl.store(slots + rows, tl.where(used, root_slot + 1 + first + place, NOWHERE), mask=is_node)
    tl.store(afters + rows, tl.full([PLACES], 0, tl.int32) + first, mask=is_node)
    source = tl.where(has_parent, root_slot + 1 + parent - WIDTH, root_slot)
    tl.store(sources + 1 + rows, tl.where(used, source, NOWHERE), mask=is_node)

    # Ancestors: the parent's, and the parent. A row has its own pass's bits first, those of earlier passes last.
    word = tl.arange(0, WORD_LANES)[None, :]
    parent_bit = tl.where(has_parent, parent - WIDTH, 0)[:, None]
    parent_word = tl.where(has_parent[:, None] & (parent_bit // BITS == word), 1 << (parent_bit % BITS), 0)
    above = ancestors + (sequence * NODES + parent)[:, None] * WORDS
    inside = is_node[:, None] & (word < WORDS)
    inherited = tl.load(above + word, mask=inside & has_parent[:, None], other=0)
    tl.store(ancestors + node[:, None] * WORDS + word, inherited | parent_word, mask=inside)
    earlier = word - (ROW_WORDS - (first + BITS - 1) // BITS)
    is_earlier = has_parent[:, None] & (earlier >= 0)
    bits = tl.load(above + earlier, mask=is_node[:, None] & is_earlier & (word < ROW_WORDS), other=0)
    bits |= tl.where(is_earlier & (parent_bit // BITS == earlier), 1 << (parent_bit % BITS), 0)
    bits |= tl.where(word == (place // BITS)[:, None], (1 << (place % BITS))[:, None], 0)
    row_bits = row_words + rows[:, None] * ROW_WORDS + word
    tl.store(row_bits, tl.where(used, bits, 0), mask=is_node[:, None] & (word < ROW_WORDS))

    tile = tl.arange(0, TILE_LANES)
    fields = tiles + (sequence * TILES + tile) * FIELDS
    once = tl.where(used & (tile < TILES), 1, 0)
    for_nodes = tl.minimum(PER_TILE, WIDTH - tile * PER_TILE)
    tl.store(fields, once * (sequence * WIDTH + tile * PER_TILE), mask=tile < TILES)
    tl.store(fields + 1, once * for_nodes, mask=tile < TILES)
    tl.store(fields + 2, once * (root_slot - root_position), mask=tile < TILES)
    tl.store(fields + 3, once * (root_position + 1), mask=tile < TILES)
    tl.store(fields + 4, once * (sequence * WIDTH), mask=tile < TILES)
    tl.store(fields + 5, once * 0, mask=tile < TILES)  # not a chain
    tl.store(fields + 6, once * first, mask=tile < TILES)


class BeamLaunch:
    """All passes of a beam in one launch: ``root`` reads the text, ``level`` is run again for each pass after it."""

    def __init__(
        self, root: FeaturePass, level: FeaturePass, plan: BeamPlan, num_sequences: int, vocabulary: torch.Tensor | None
    ) -> None:
        """``vocabulary``: token of the target by token of the head; None: they are the same."""
        device, num_nodes = level.inputs.ids.device, (plan.passes + 1) * plan.width
        self.root, self._level, self._plan, self._vocabulary = root, level, plan, vocabulary
        self._num_sequences, self._num_nodes = num_sequences, num_nodes
        self._count = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device_count = torch.zeros(1, dtype=torch.int32, device=device)
        # tokens, probs, values and picks side by side, so that one copy takes them to the host
        sizes = [num_sequences * num_nodes * plan.best] * 3 + [num_sequences * num_nodes]
        self._found = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._answer = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        tokens, probs, paths, picks = self._found.split(sizes)
        self._parts = tokens, probs.view(torch.float32), paths.view(torch.float32), picks
        self._values = torch.ones(num_sequences, num_nodes, device=device)  # that of the root stays
        self._num_words = -(-num_nodes // WORD_BITS)
        self._ancestors = torch.zeros(num_sequences * num_nodes * self._num_words, dtype=torch.int32, device=device)
        level.inputs.moves[0] = num_sequences * plan.width
        level.inputs.slots.fill_(NO_SLOT)  # of padding rows
        level.inputs.wanted.copy_(torch.arange(len(level.inputs.wanted)))

    def begin(self, num_sequences: int) -> None:
        """The inputs of ``root`` are filled, for this many sequences."""
        self._count[0] = num_sequences

    def launch(self) -> None:
        self._device_count.copy_(self._count, non_blocking=True)
        self.root.inputs.send()
        self.root.compute()
        for turn in range(1, self._plan.passes + 2):
            self._launch_pick(turn)
            if turn <= self._plan.passes:
                self._level.compute()
        self._answer.copy_(self._found, non_blocking=True)

    def beams(self) -> list[Beam]:
        """One per sequence. The launch must have finished."""
        size = self._num_nodes * self._plan.best
        candidates, picks = np.split(self._answer.numpy(), [3 * self._num_sequences * size])
        tokens, probs, values = candidates.reshape(3, self._num_sequences, size)
        picks = picks.reshape(self._num_sequences, self._num_nodes)
        picks[:, : self._plan.width] = NOT_PICKED
        floats = probs.view(np.float32), values.view(np.float32)
        return [Beam(*parts) for parts in zip(tokens, *floats, picks, strict=True)]

    def _launch_pick(self, turn: int) -> None:
        plan, root, inputs = self._plan, self.root.inputs, self._level.inputs
        words = (self._level if turn > 1 else self.root).words
        per_tile = self._level.nodes_per_tile
        row_words, tiles = inputs.words.shape[1], -(-plan.width // per_tile)
        _pick[(self._num_sequences,)](
            words, root.wanted, root.slots, root.positions, self._device_count, self._vocabulary,
            *self._parts, self._values, self._ancestors,
            inputs.ids, inputs.positions, inputs.slots, inputs.afters, inputs.moves, inputs.tiles, inputs.words, turn,
            WIDTH=plan.width, BEST=plan.best, STRIDE=words.shape[1], NODES=self._num_nodes, WORDS=self._num_words,
            ROW_WORDS=row_words, PER_TILE=per_tile, TILES=tiles,
            SELECTED=self.root.selects_rows, MAPPED=self._vocabulary is not None, LAST=turn > plan.passes,
            LANES=triton.next_power_of_2(plan.width * plan.best), PLACES=triton.next_power_of_2(plan.width),
            WORD_LANES=triton.next_power_of_2(max(row_words, self._num_words)),
            TILE_LANES=triton.next_power_of_2(tiles), num_warps=WARPS,
        )  # fmt: skip
