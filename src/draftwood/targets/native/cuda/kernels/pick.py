"""Between two passes of a search: value the candidates of the last pass, pick the nodes of the next, write its inputs.

targets/searches.py numbers nodes and candidates. The value of a candidate is the probability of its path. Picks are by
value, then by number. What a pass found lies together, in one record per pass.
"""

# ruff: noqa: N803 - compile-time values are in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from draftwood.targets.native.cuda.attention import TILE_FIELDS, WORD_BITS
from draftwood.targets.native.cuda.common import wait_for_input
from draftwood.targets.native.cuda.inputs import NO_SLOT

LIMITS = 2  # per tree: nodes below the root, levels below the root
BITS = tl.constexpr(WORD_BITS)
FIELDS = tl.constexpr(TILE_FIELDS)
NOWHERE = tl.constexpr(NO_SLOT)


@triton.jit(do_not_specialize=["record"])  # it changes with the number of trees
def pick_nodes(
    words, word_rows, wanted, root_slots, root_positions, count, limits, fixed, vocabulary,
    tokens, probs, paths, picks, depths, values, left, ancestors, sums, turns,
    ids, positions, slots, afters, sources, tiles, row_words, record,
    WIDTH: tl.constexpr, BEST: tl.constexpr, STRIDE: tl.constexpr, NODES: tl.constexpr,
    WORDS: tl.constexpr, ROW_WORDS: tl.constexpr, PER_TILE: tl.constexpr, TILES: tl.constexpr,
    IS_FIRST: tl.constexpr, IS_ANYWHERE: tl.constexpr, IS_FIXED: tl.constexpr,
    MAPPED: tl.constexpr, FEATURES: tl.constexpr, PDL: tl.constexpr,
    LANES: tl.constexpr, PLACES: tl.constexpr, WORD_LANES: tl.constexpr, TILE_LANES: tl.constexpr,
):  # fmt: skip
    """One program per tree. The last pass, ``turn - 1``, has left its top entries in ``words [rows, STRIDE]``; after
    the text, those of a root are in its row of ``word_rows``."""
    tree = tl.program_id(0)
    wait_for_input(PDL)
    used = tree < tl.load(count)
    turn = 1 if IS_FIRST else tl.load(turns + tree)
    size = tl.load(limits + tree * 2)
    max_depth = tl.load(limits + tree * 2 + 1)
    root_row = tl.load(wanted + tree, mask=used, other=0)
    group: tl.constexpr = WIDTH * BEST  # candidates of a pass
    first = (turn - 1) * WIDTH  # node of the last pass; also the number of nodes below the root that were run

    # Candidates, a lane each: those of the last pass, and for picks from anywhere all before them.
    lane = tl.arange(0, LANES)
    number = lane if IS_ANYWHERE else first * BEST + lane
    node = number // BEST
    rank = number % BEST
    spot = number // group * record + tree * group + number % group  # in the records
    is_last = (node >= first) & (node < first + WIDTH)
    is_new = used & (node >= first) & (node < first + (1 if IS_FIRST else WIDTH))
    row = tl.load(word_rows + tree + lane * 0, mask=is_new, other=0) if IS_FIRST else tree * WIDTH + node - first
    entry = words + row * STRIDE
    token = tl.load(entry + rank, mask=is_new, other=0)
    logit = tl.load(entry + STRIDE // 2 + rank, mask=is_new, other=0).to(tl.float32, bitcast=True)
    total = tl.load(entry + STRIDE - 1, mask=is_new, other=0).to(tl.float32, bitcast=True)
    value = tl.load(values + tree * NODES + node, mask=is_new, other=0.0)
    prob = tl.where(value > 0.0, tl.minimum(tl.exp(logit - total), 1.0), 0.0)
    value = value * prob
    tl.store(tokens + spot, token, mask=is_last)
    tl.store(probs + spot, prob, mask=is_last)
    tl.store(paths + spot, value, mask=is_last)
    unpicked = value
    if IS_ANYWHERE:
        is_old = used & (node < first)
        token = tl.where(is_old, tl.load(tokens + spot, mask=is_old, other=0), token)
        value = tl.where(is_old, tl.load(paths + spot, mask=is_old, other=0.0), value)
        unpicked = tl.where(is_old, tl.load(left + spot, mask=is_old, other=0.0), unpicked)
        place_of = node // WIDTH * record + tree * WIDTH + node % WIDTH
        depth_of = tl.load(depths + place_of, mask=used & (node < first + WIDTH), other=0)
        is_open = (unpicked > 0.0) & (depth_of + 1 < max_depth)
    else:
        is_open = (unpicked > 0.0) & (turn < max_depth)

    # The best of them, one after the other: positive floats sort like their bits, of equal ones the first is best.
    place = tl.arange(0, PLACES)
    chosen = tl.full([PLACES], 0, tl.int32)  # candidate
    chosen_token = tl.full([PLACES], 0, tl.int32)
    chosen_value = tl.full([PLACES], 0.0, tl.float32)
    keys = (unpicked.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (LANES - 1 - lane).to(tl.int64)
    keys = tl.where(is_open, keys, 0)
    for index in range(WIDTH):
        if IS_FIXED:
            wish = tl.load(fixed + tree * NODES + turn * WIDTH + index)
            best = tl.max(tl.where(number == wish, keys, 0), axis=0)
        else:
            best = tl.max(keys, axis=0)
        at = LANES - 1 - (best & 0x7FFFFFFF).to(tl.int32)
        best_value = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        is_found = best > 0
        if IS_ANYWHERE:  # a child of the last node of the tree has no place in it
            is_found = is_found & (tl.sum(tl.where(value >= best_value, 1, 0), axis=0) < size)
        is_pick = (place == index) & is_found
        chosen = tl.where(is_pick, at if IS_ANYWHERE else first * BEST + at, chosen)
        chosen_token = tl.where(is_pick, tl.sum(tl.where(lane == at, token, 0), axis=0), chosen_token)
        chosen_value = tl.where(is_pick, best_value, chosen_value)
        keys = tl.where((lane == at) & is_found, 0, keys)
        unpicked = tl.where((lane == at) & is_found, 0.0, unpicked)
    if IS_ANYWHERE:
        tl.store(left + spot, unpicked, mask=node < first + WIDTH)
    tl.store(sums + turn * tl.num_programs(0) + tree, tl.sum(chosen_value, axis=0))

    # Missing nodes run like others, as children of the root, but nothing follows them.
    is_node = place < WIDTH
    is_found = chosen_value > 0.0
    parent = tl.where(is_found, chosen // BEST, 0)
    has_parent = parent > 0  # below the root
    depth = 1 + tl.load(depths + parent // WIDTH * record + tree * WIDTH + parent % WIDTH, mask=has_parent, other=0)
    here = turn * record + tree * WIDTH + place
    tl.store(picks + here, tl.where(is_found, chosen, -1), mask=is_node)
    tl.store(depths + here, depth, mask=is_node)
    own = tree * NODES + turn * WIDTH + place
    tl.store(values + own, chosen_value, mask=is_node)
    root_slot = tl.load(root_slots + root_row, mask=used, other=0)
    root_position = tl.load(root_positions + root_row, mask=used, other=0)
    rows = tree * WIDTH + place
    if MAPPED:
        chosen_token = tl.load(vocabulary + chosen_token, mask=is_node, other=0).to(tl.int32)
    tl.store(ids + rows, chosen_token, mask=is_node)
    tl.store(positions + rows, tl.where(used, root_position + depth, 0), mask=is_node)
    tl.store(slots + rows, tl.where(used, root_slot + 1 + first + place, NOWHERE), mask=is_node)
    tl.store(afters + rows, tl.full([PLACES], 0, tl.int32) + first, mask=is_node)
    if FEATURES:
        source = tl.where(has_parent, root_slot + 1 + parent - WIDTH, root_slot)
        tl.store(sources + 1 + rows, tl.where(used, source, NOWHERE), mask=is_node)

    # Ancestors: the parent's, and the parent. A row has its own pass's bits first, those of earlier passes last.
    word = tl.arange(0, WORD_LANES)[None, :]
    parent_bit = tl.where(has_parent, parent - WIDTH, 0)[:, None]
    parent_word = tl.where(has_parent[:, None] & (parent_bit // BITS == word), 1 << (parent_bit % BITS), 0)
    above = ancestors + (tree * NODES + parent)[:, None] * WORDS
    inside = is_node[:, None] & (word < WORDS)
    inherited = tl.load(above + word, mask=inside & has_parent[:, None], other=0)
    tl.store(ancestors + own[:, None] * WORDS + word, inherited | parent_word, mask=inside)
    earlier = word - (ROW_WORDS - (first + BITS - 1) // BITS)
    is_earlier = has_parent[:, None] & (earlier >= 0)
    bits = tl.load(above + earlier, mask=is_node[:, None] & is_earlier & (word < ROW_WORDS), other=0)
    bits |= tl.where(is_earlier & (parent_bit // BITS == earlier), 1 << (parent_bit % BITS), 0)
    bits |= tl.where(word == (place // BITS)[:, None], (1 << (place % BITS))[:, None], 0)
    row_bits = row_words + rows[:, None] * ROW_WORDS + word
    tl.store(row_bits, tl.where(used, bits, 0), mask=is_node[:, None] & (word < ROW_WORDS))

    tile = tl.arange(0, TILE_LANES)
    fields = tiles + (tree * TILES + tile) * FIELDS
    once = tl.where(used & (tile < TILES), 1, 0)
    for_nodes = tl.minimum(PER_TILE, WIDTH - tile * PER_TILE)
    tl.store(fields, once * (tree * WIDTH + tile * PER_TILE), mask=tile < TILES)
    tl.store(fields + 1, once * for_nodes, mask=tile < TILES)
    tl.store(fields + 2, once * (root_slot - root_position), mask=tile < TILES)
    tl.store(fields + 3, once * (root_position + 1), mask=tile < TILES)
    tl.store(fields + 4, once * (tree * WIDTH), mask=tile < TILES)
    tl.store(fields + 5, once * 0, mask=tile < TILES)  # not a chain
    tl.store(fields + 6, once * first, mask=tile < TILES)
    tl.store(turns + tree, turn + 1)
