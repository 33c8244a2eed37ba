"""Draws a token after each of some rows of logits, from the distribution that ``sampling.Warper`` describes.

The weight of a token is ``exp((logit - best) / temperature)`` in units of 2^-44, as a whole number. Sums of whole
numbers are exact in every order, so a draw depends on nothing but its row, its rule and its random number: the tokens
in the order of their ids share the interval from 0 to 1 by their weights, and the number falls into one of them, as in
``sampling.draw_tokens``. A token that is less likely than 2^-44 times the best one is never drawn.

The first kernel reads the logits once and sums the weights of every block. The second, one program per row, finds the
block and then the token. Top-k and top-p keep the tokens from some logit up, of equal ones those with the lowest ids:
the program looks for that logit by narrowing an interval, in the blocks whose best logit is high enough. With min-p,
tokens that are less likely have no weight.

A logit that is not a number counts as -inf, as for greedy choices.
"""

# ruff: noqa: N803 - compile-time values are in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from draftwood.targets.native.cuda.common import clean, exponent_base, launch_options
from draftwood.targets.native.cuda.kernels.top import TILE, block_size
from draftwood.targets.native.decoder import DRAW_FIELDS

MAX_VOCABULARY = 2**19 - 1  # for which sums of weights are below 2^63
UNITS = tl.constexpr(2.0**44)  # weight of the best token
LOWEST = tl.constexpr(-0x7F800001)  # the key of -inf
MISSING = tl.constexpr(-0x7FFFFFFF)  # lower than the key of any logit
MARGIN = tl.constexpr(0.01)  # by which a bound is lowered, in case that exp and log are rounded
WARPS = 16
SPLITS = 4  # keys that are tried at once


class DrawScratch(NamedTuple):
    """Memory of ``launch_draws`` for at most n draws."""

    sums: torch.Tensor  # [n * blocks] int64, weights of blocks
    candidates: torch.Tensor  # [n * blocks] int32, blocks that may hold the token

    @classmethod
    def new(cls, num_draws: int, vocab_size: int, device: torch.device) -> "DrawScratch":
        size = num_draws * triton.cdiv(vocab_size, block_size(vocab_size))
        return cls(
            torch.empty(size, dtype=torch.int64, device=device), torch.empty(size, dtype=torch.int32, device=device)
        )


@triton.jit
def _key(values):
    """int32 keys that sort like float32 values."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The value of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(values, best, temperature, min_p):
    """int64 weights of logits; 0 for those that are less than ``min_p`` times as likely as the best one."""
    shares = tl.exp((values - best) / temperature)
    return (tl.where(shares >= min_p, shares, 0.0) * UNITS).to(tl.int64)


@triton.jit(do_not_specialize=["word_stride", "num_best"])
def _weigh(
    logits, words, draws, sums, row_stride, word_stride, num_best, vocab_size, num_blocks,
    NUM_FIELDS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write the weights of BLOCKS blocks of a row to sums [n, num_blocks]."""
    place = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    row = tl.load(draws + place * NUM_FIELDS).to(tl.int64)
    temperature = tl.load(draws + place * NUM_FIELDS + 1).to(tl.float32)
    best = exponent_base(tl.load(words + row * word_stride + num_best).to(tl.float32, bitcast=True))
    ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [BLOCKS, BLOCK]
    values = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf"))
    weights = _weights(clean(values), best, temperature, 0.0)
    tl.store(sums + place * num_blocks + blocks, tl.sum(weights, axis=1), mask=blocks < num_blocks)


@triton.jit
def _read(logits, candidates, first, count, vocab_size, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Ids, keys and values [CHUNK * BLOCK] of the candidates from ``first`` on."""
    at = first + tl.arange(0, CHUNK)
    block = tl.load(candidates + at, mask=at < count, other=0)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (at < count)[:, None] & (ids < vocab_size)
    values = clean(tl.load(logits + ids, mask=inside, other=float("-inf")))
    keys = tl.where(inside, _key(values), MISSING)
    size: tl.constexpr = CHUNK * BLOCK
    return tl.reshape(ids, (size,)), tl.reshape(keys, (size,)), tl.reshape(values, (size,))


@triton.jit
def _list_blocks(candidates, keys, blocks, lowest):
    """Write the blocks whose best key is at least ``lowest``, ascending; return how many they are."""
    tl.debug_barrier()  # all threads have read what is overwritten
    chosen = keys >= lowest
    places = tl.cumsum(chosen.to(tl.int32), axis=0)
    tl.store(candidates + places - 1, blocks, mask=chosen)
    tl.debug_barrier()  # all threads see all of it
    return tl.max(places, axis=0)


@triton.jit
def _split(low, high, SPLITS: tl.constexpr):
    """SPLITS keys that divide what lies between ``low`` and ``high`` evenly; all above ``low``, none above ``high``."""
    parts: tl.constexpr = SPLITS + 1
    return low + ((tl.arange(0, SPLITS) + 1) * (high - low) + (parts - 1)) // parts


@triton.jit
def _narrow(keys, amounts, goal, low, high, SPLITS: tl.constexpr):
    """The highest key between ``low`` and ``high`` from which on the amounts reach the goal; ``low`` if none does."""
    while low < high:
        tried = _split(low, high, SPLITS)
        reached = tl.sum(tl.where(keys[None, :] >= tried[:, None], amounts[None, :], 0), axis=1)
        low = tl.maximum(low, tl.max(tl.where(reached >= goal, tried, low), axis=0))
        high = tl.minimum(high, tl.min(tl.where(reached >= goal, high, tried - 1), axis=0))
    return low


@triton.jit
def _amounts(
    logits, candidates, count, lowest, best, temperature, vocab_size,
    COUNTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """For each of SPLITS keys ``lowest``, the number (COUNTS) or the weight of the entries with at least this key."""
    amounts = tl.zeros((SPLITS, CHUNK * BLOCK), tl.int64)  # summed at the end: there, threads wait for each other
    for first in range(0, count, CHUNK):
        _, keys, values = _read(logits, candidates, first, count, vocab_size, BLOCK, CHUNK)
        own = tl.full(keys.shape, 1, tl.int64) if COUNTS else _weights(values, best, temperature, 0.0)
        amounts += tl.where(keys[None, :] >= lowest[:, None], own[None, :], 0)
    return tl.sum(amounts, axis=1)


@triton.jit
def _narrow_entries(
    logits, candidates, count, goal, low, high, best, temperature, vocab_size,
    COUNTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """As ``_narrow``, among the entries of the candidates."""
    while low < high:
        tried = _split(low, high, SPLITS)
        reached = _amounts(
            logits, candidates, count, tried, best, temperature, vocab_size, COUNTS, BLOCK, CHUNK, SPLITS
        )
        low = tl.maximum(low, tl.max(tl.where(reached >= goal, tried, low), axis=0))
        high = tl.minimum(high, tl.min(tl.where(reached >= goal, high, tried - 1), axis=0))
    return low


@triton.jit
def _weight_from(
    logits, candidates, count, lowest, best, temperature, vocab_size, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """The weight of the entries of the candidates with at least the key ``lowest``."""
    keys = lowest + tl.zeros((1,), tl.int64)
    return tl.sum(_amounts(logits, candidates, count, keys, best, temperature, vocab_size, False, BLOCK, CHUNK, 1))


@triton.jit
def _kept(
    logits, candidates, first, count, edge, num_equal, num_seen, best, temperature, min_p, vocab_size,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Ids and weights of a part of the candidates, and how many have the key ``edge``; beyond the first ``num_equal``
    of these, and below, the weights are 0. ``num_seen`` of them came before."""
    ids, keys, values = _read(logits, candidates, first, count, vocab_size, BLOCK, CHUNK)
    is_equal = keys == edge
    ranks = num_seen + tl.cumsum(is_equal.to(tl.int32), axis=0)
    is_kept = (keys > edge) | (is_equal & (ranks <= num_equal))
    weights = tl.where(is_kept, _weights(values, best, temperature, min_p), 0)
    return ids, weights, tl.sum(is_equal.to(tl.int32))


@triton.jit(do_not_specialize=["word_stride", "num_best"])
def _draw(
    logits, words, peaks, draws, sums, candidates, tokens,
    row_stride, word_stride, num_best, vocab_size, num_blocks,
    NUM_FIELDS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_PAD: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """The token of one draw; -1 if the best logit is not finite."""
    place = tl.program_id(0).to(tl.int64)
    draw = draws + place * NUM_FIELDS
    row, temperature = tl.load(draw).to(tl.int64), tl.load(draw + 1).to(tl.float32)
    top_k, top_p, min_p = tl.load(draw + 2).to(tl.int64), tl.load(draw + 3), tl.load(draw + 4).to(tl.float32)
    number = tl.load(draw + 5)
    highest = tl.load(words + row * word_stride + num_best).to(tl.float32, bitcast=True)
    best = exponent_base(highest)
    logits += row * row_stride
    candidates += place * num_blocks

    blocks = tl.arange(0, BLOCKS_PAD)
    there = blocks < num_blocks
    weights = tl.load(sums + place * num_blocks + blocks, mask=there, other=0)  # [BLOCKS_PAD]
    total = tl.sum(weights)
    begins = total * 0  # weights before the first candidate
    edge = (total * 0 + MISSING).to(tl.int32)  # key of the least likely tokens that are kept
    num_equal = (total * 0 + vocab_size).to(tl.int32)  # of them
    if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
        values = tl.load(peaks + row * (2 * num_blocks) + blocks, mask=there, other=float("-inf"))
        keys = tl.where(there, _key(values), MISSING).to(tl.int64)
        top = _key(highest).to(tl.int64)
        lowest = top * 0 + LOWEST
        if (top_k > 0) & (top_k < vocab_size):
            bound = _narrow(keys, there.to(tl.int64), top_k, lowest, top, SPLITS)  # so many blocks have one at least
            count = _list_blocks(candidates, keys, blocks, bound)
            lowest = _narrow_entries(
                logits, candidates, count, top_k, bound, top, best, temperature, vocab_size, True, BLOCK, CHUNK, SPLITS
            )
            total = _weight_from(logits, candidates, count, lowest, best, temperature, vocab_size, BLOCK, CHUNK)
        if top_p < 1.0:
            goal = tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total)
            # Logits so low that all of them together weigh less than what is left out.
            share = ((1.0 - top_p) * total.to(tl.float64) / vocab_size).to(tl.float32) / UNITS
            tail = best + temperature * (tl.log(share) - MARGIN)
            bound = tl.maximum(lowest, tl.minimum(_key(tail).to(tl.int64), top))
            heights = tl.where(keys >= bound, _weights(values, best, temperature, 0.0), 0)
            bound = _narrow(keys, heights, goal, bound, top, SPLITS)  # the best ones of blocks reach the goal
            count = _list_blocks(candidates, keys, blocks, bound)
            lowest = _narrow_entries(
                logits, candidates, count, goal, bound, top, best, temperature, vocab_size, False, BLOCK, CHUNK, SPLITS
            )
            above = _weight_from(logits, candidates, count, lowest + 1, best, temperature, vocab_size, BLOCK, CHUNK)
            each = tl.maximum(_weights(_value(lowest), best, temperature, 0.0), 1)
            num_equal = tl.maximum((goal - above + each - 1) // each, 1).to(tl.int32)
        edge = lowest.to(tl.int32)
        is_likely = tl.exp((values - best) / temperature) >= min_p
        count = _list_blocks(candidates, tl.where(is_likely, keys, MISSING), blocks, lowest)
        total, num_seen = total * 0, num_equal * 0
        for first in range(0, count, CHUNK):
            _, kept, equal = _kept(
                logits, candidates, first, count, edge, num_equal, num_seen, best, temperature, min_p, vocab_size,
                BLOCK, CHUNK,
            )  # fmt: skip
            total += tl.sum(kept)
            num_seen += equal
        target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    else:
        target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
        reached = tl.cumsum(weights, axis=0)
        block = tl.min(tl.where(reached > target, blocks, BLOCKS_PAD), axis=0)
        begins = tl.sum(tl.where(blocks == block, reached - weights, 0))
        count = _list_blocks(candidates, tl.where(blocks == block, 0, MISSING), blocks, 0)

    token, num_seen = num_equal * 0 - 1, num_equal * 0
    entries = tl.arange(0, CHUNK * BLOCK)
    for first in range(0, count, CHUNK):
        ids, kept, equal = _kept(
            logits, candidates, first, count, edge, num_equal, num_seen, best, temperature, min_p, vocab_size,
            BLOCK, CHUNK,
        )  # fmt: skip
        ends = begins + tl.sum(kept)
        if (token < 0) & (target < ends):
            reached = begins + tl.cumsum(kept, axis=0)
            entry = tl.min(tl.where(reached > target, entries, CHUNK * BLOCK), axis=0)
            token = tl.sum(tl.where(entries == entry, ids, 0))
        begins = ends
        num_seen += equal
    tl.store(tokens + place, tl.where(tl.abs(highest) < float("inf"), token, -1))


def launch_draws(
    logits: torch.Tensor,
    words: torch.Tensor,
    peaks: torch.Tensor,
    draws: torch.Tensor,
    scratch: DrawScratch,
    tokens: torch.Tensor,
) -> None:
    """Fill ``tokens [n]`` int32 by ``draws [n, DRAW_FIELDS]`` from ``logits [R, V]`` float32, with contiguous rows.

    ``words`` and ``peaks`` are what ``launch_top_rows`` has written for these logits. Does not wait.
    """
    vocab_size, num_best = logits.shape[1], words.shape[1] // 2
    block = block_size(vocab_size)
    num_blocks, chunk = triton.cdiv(vocab_size, block), max(TILE // block, 1)
    sizes = logits.stride(0), words.stride(0), num_best, vocab_size, num_blocks
    options = launch_options(pdl=False)
    _weigh[(len(draws), triton.cdiv(num_blocks, chunk))](
        logits, words, draws, scratch.sums, *sizes,
        NUM_FIELDS=DRAW_FIELDS, BLOCK=block, BLOCKS=chunk, num_warps=4, **options,
    )  # fmt: skip
    _draw[(len(draws),)](
        logits, words, peaks, draws, scratch.sums, scratch.candidates, tokens, *sizes,
        NUM_FIELDS=DRAW_FIELDS, BLOCK=block, BLOCKS_PAD=triton.next_power_of_2(num_blocks), CHUNK=chunk,
        SPLITS=SPLITS, num_warps=WARPS, **options,
    )  # fmt: skip
