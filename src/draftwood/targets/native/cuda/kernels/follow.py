"""After a pass over one tree: the accepted path, as the text of a pass that reads its hidden states.

The host finds the same path when it gets the answer. This kernel is quicker: what follows need not wait for the host.
"""

# ruff: noqa: N803 - compile-time values are in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from draftwood.targets.base import DeviceAnswer
from draftwood.targets.native.cuda.attention import TILE_FIELDS, WORD_BITS
from draftwood.targets.native.cuda.common import launch_options
from draftwood.targets.native.cuda.inputs import NO_SLOT, Inputs

MAX_FOLLOWED = 128  # nodes of a tree: the kernel compares all pairs
GIVEN = -1  # in place of a slot: the feature of a row is computed from given hidden states
BITS = tl.constexpr(WORD_BITS)
FIELDS = tl.constexpr(TILE_FIELDS)
NOWHERE = tl.constexpr(NO_SLOT)
IS_GIVEN = tl.constexpr(GIVEN)


@triton.jit(do_not_specialize=["states", "step", "base", "length"])
def _follow(
    ids, positions, slots, words, tiles, choices, states, step, base, length,
    own_ids, own_positions, own_slots, wanted, sources, own_tiles, addresses, told,
    NODES: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, PER_TILE: tl.constexpr, TILES: tl.constexpr, TILE_LANES: tl.constexpr,
):  # fmt: skip
    node = tl.arange(0, LANES)
    slot = tl.load(slots + node, mask=node < NODES, other=NOWHERE)
    used = slot >= 0
    position = tl.load(positions + node, mask=used, other=0)
    choice = tl.load(choices + node * STRIDE, mask=used, other=-1)
    is_chain = tl.load(tiles + 5) != 0

    # [nodes, nodes]: whether the second one is above the first.
    one, other = node[:, None], node[None, :]
    bits = tl.load(words + one * WORDS + other // BITS, mask=used[:, None] & (other // BITS < WORDS), other=0)
    is_above = (other < one) & (is_chain | (((bits >> (other % BITS)) & 1) != 0))
    parent = tl.max(tl.where(is_above, other, -1), axis=1)  # the last of them, since paths ascend
    wish = tl.load(choices + tl.maximum(parent, 0) * STRIDE, mask=used, other=-1)
    is_wrong = (parent >= 0) & (tl.load(ids + node, mask=used, other=0) != wish)
    num_wrong = tl.sum(tl.where(is_above & is_wrong[None, :], 1, 0), axis=1)
    is_accepted = used & (num_wrong == 0) & (is_wrong == 0)
    count = tl.sum(tl.where(is_accepted, 1, 0), axis=0)

    # Each of them becomes a row of text: the token that follows it, read with its hidden states.
    row = tl.arange(0, ROWS)
    order = position - tl.load(positions)
    is_row = is_accepted[None, :] & (order[None, :] == row[:, None])  # [rows, nodes]
    is_text = row < count
    token = tl.sum(tl.where(is_row, choice[None, :], 0), axis=1)
    place = tl.sum(tl.where(is_row, other, 0), axis=1)
    tl.store(own_ids + row, tl.where(is_text, tl.maximum(token, 0), 0))  # a token that could not be drawn is negative
    tl.store(own_positions + row, tl.where(is_text, length + row, 0))
    tl.store(own_slots + row, tl.where(is_text, base + length + row, NOWHERE))
    tl.store(sources + 1 + row, row * 0 + IS_GIVEN)
    tl.store(addresses + row, states + place.to(tl.int64) * step)
    tl.store(told + 1 + row, token)
    num_rows = tl.minimum(count, ROWS)
    tl.store(sources, num_rows)
    tl.store(wanted, num_rows - 1)
    tl.store(told, count)

    tile = tl.arange(0, TILE_LANES)
    fields = own_tiles + tile * FIELDS
    left = num_rows - tile * PER_TILE
    once = tl.where((tile < TILES) & (left > 0), 1, 0)
    tl.store(fields, once * tile * PER_TILE, mask=tile < TILES)
    tl.store(fields + 1, once * tl.minimum(left, PER_TILE), mask=tile < TILES)
    tl.store(fields + 2, once * base, mask=tile < TILES)
    tl.store(fields + 3, once * length, mask=tile < TILES)
    tl.store(fields + 4, once * 0, mask=tile < TILES)
    tl.store(fields + 5, once, mask=tile < TILES)  # a chain
    tl.store(fields + 6, once * 0, mask=tile < TILES)


def follow_path(answer: DeviceAnswer, base: int, length: int, inputs: Inputs, addresses: Tensor, told: Tensor) -> None:
    """Write the inputs of a pass over text: the tokens after the accepted nodes of a tree, which continue a sequence
    with the first slot ``base`` and ``length`` positions. ``addresses [rows]`` are those of their hidden states.

    ``told [1 + rows]`` receives the number of accepted nodes and the tokens. Of more nodes than rows the first ones are
    read.
    """
    taps, rows = answer.taps, len(addresses)
    _follow[(1,)](
        answer.ids, answer.positions, answer.slots, answer.words, answer.tiles, answer.choices,
        taps.data_ptr(), taps.stride(0) * taps.element_size(), base, length,
        inputs.ids, inputs.positions, inputs.slots, inputs.wanted, inputs.moves, inputs.tiles, addresses, told,
        NODES=len(answer.ids), LANES=triton.next_power_of_2(max(len(answer.ids), 16)), WORDS=answer.words.shape[1],
        STRIDE=answer.choices.stride(0), ROWS=rows, PER_TILE=inputs.nodes_per_tile, TILES=len(inputs.tiles),
        TILE_LANES=triton.next_power_of_2(len(inputs.tiles)), num_warps=8,
        **launch_options(False),
    )  # fmt: skip
