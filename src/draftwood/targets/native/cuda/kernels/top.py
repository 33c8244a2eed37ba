"""The top k entries of each row of logits, and the row's log-sum-exp, for little more than one read of the logits.

The vocabulary is divided into blocks. The first kernel reads all rows once and writes two numbers per block: its
maximum (peak) and the sum of exponentials relative to it. The second kernel, one program per row, takes the k blocks
with the highest peaks and finds the top k entries in them: any entry outside has at least k better ones, the peaks of
those blocks. Equal entries are ordered by id and equal peaks by block, which is the same order, so ties are exact.

The second kernel finds both, blocks and entries, by k maxima in turn. Value and index are packed into one integer that
sorts in the order of the result, so one maximum gives both.
"""

# ruff: noqa: N803 - compile-time values are in capitals
# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.targets.native.cuda.common import block_peaks, clean, exponent_base, launch_options, wait_for_input

BLOCK = 128  # minimum number of entries of a block: what a warp reads at once
MAX_BLOCKS = 2048  # of a row, which one program searches
TILE = 2048  # entries that a program of the first kernel reads
FIND_WARPS = 4


@triton.jit
def _sort_keys(values, indices, there):
    """int64 keys that sort like the values. Of equal values the lower index sorts higher; missing entries sort last."""
    bits = values.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative floats are in reverse order
    keys = (order.to(tl.int64) << 32) | (0x7FFFFFFF - indices).to(tl.int64)
    return tl.where(there, keys, -0x8000000000000000)


@triton.jit
def _index(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _value_bits(key):
    order = (key >> 32).to(tl.int32)
    return order ^ ((order >> 31) & 0x7FFFFFFF)


@triton.jit
def _read_blocks(
    logits, scratch, row_stride, vocab_size, num_blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write peak and sum of BLOCKS blocks of a row to scratch [n, 2, num_blocks]."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [BLOCKS, BLOCK]
    wait_for_input(PDL)
    values = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf"))
    peaks, sums = block_peaks(tl.trans(values), BLOCK)  # [BLOCKS]
    out = scratch + row * (2 * num_blocks) + blocks
    tl.store(out, peaks, mask=blocks < num_blocks)
    tl.store(out + num_blocks, sums, mask=blocks < num_blocks)


@triton.jit
def _find_best(
    logits, scratch, words, row_stride, vocab_size, num_blocks,
    K: tl.constexpr, K_PAD: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the words [2K + 1] of a row from the peaks of its blocks."""
    row = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, K_PAD)
    blocks = tl.arange(0, BLOCKS_PAD)
    wait_for_input(PDL)
    there = blocks < num_blocks
    parts = scratch + row * (2 * num_blocks) + blocks
    peaks = tl.load(parts, mask=there, other=float("-inf"))  # [BLOCKS_PAD]
    sums = tl.load(parts + num_blocks, mask=there, other=0.0)
    base = exponent_base(tl.max(peaks, axis=0))
    total = tl.sum(tl.where(peaks == float("-inf"), 0.0, sums * tl.exp(exponent_base(peaks) - base)), axis=0)

    keys = _sort_keys(peaks, blocks, there)
    picked = tl.zeros((K_PAD,), tl.int32) + num_blocks  # none
    for rank in range(K):
        best = tl.max(keys, axis=0)
        picked = tl.where(ranks == rank, _index(best), picked)
        keys = tl.where(keys == best, -0x8000000000000000, keys)

    ids = picked[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [K_PAD, BLOCK]
    inside = (picked[:, None] < num_blocks) & (ids < vocab_size)
    values = tl.load(logits + row * row_stride + ids, mask=inside, other=float("-inf"))
    entries = tl.reshape(_sort_keys(clean(values), ids, inside), (K_PAD * BLOCK,))
    out = words + row * (2 * K + 1)
    for rank in range(K):
        best = tl.max(entries, axis=0)
        tl.store(out + rank, _index(best))
        tl.store(out + K + rank, _value_bits(best))
        entries = tl.where(entries == best, -0x8000000000000000, entries)
    tl.store(out + 2 * K, (base + tl.log(total)).to(tl.int32, bitcast=True))


def block_size(vocab_size: int) -> int:
    """The smallest power of two, at least BLOCK, that divides a row into at most MAX_BLOCKS blocks."""
    size = BLOCK
    while size * MAX_BLOCKS < vocab_size:
        size *= 2
    return size


def new_words(num_rows: int, k: int, device: torch.device) -> Tensor:
    """A buffer for results [n, 2k + 1]: k ids, the bits of their k logits, the bits of log_total."""
    return torch.empty((num_rows, 2 * k + 1), dtype=torch.int32, device=device)


def new_scratch(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """The scratch memory of ``launch_top_rows`` for at most ``num_rows`` rows."""
    num_blocks = triton.cdiv(vocab_size, block_size(vocab_size))
    return torch.empty(num_rows * 2 * num_blocks, dtype=torch.float32, device=device)


def launch_top_rows(
    logits: Tensor, k: int, words: Tensor, scratch: Tensor, *, peaks_known: bool = False, pdl: bool = False
) -> None:
    """Fill the first n rows of ``words [>= n, 2k + 1]`` from ``logits [n, V]`` float32, whose rows are contiguous.

    Allocates nothing and does not wait, so a CUDA graph can capture it. k is at most 64 and at most V. With
    ``peaks_known`` the kernel that wrote the logits has already filled ``scratch``, see ``block_peaks``.
    """
    num_rows, vocab_size = logits.shape
    block = block_size(vocab_size)
    num_blocks = triton.cdiv(vocab_size, block)
    options = launch_options(pdl)
    if not peaks_known:
        blocks = max(TILE // block, 1)
        _read_blocks[(num_rows, triton.cdiv(num_blocks, blocks))](
            logits, scratch, logits.stride(0), vocab_size, num_blocks,
            BLOCK=block, BLOCKS=blocks, PDL=pdl, num_warps=4, **options,
        )  # fmt: skip
    k_pad, blocks_pad = triton.next_power_of_2(k), triton.next_power_of_2(num_blocks)
    _find_best[(num_rows,)](
        logits, scratch, words, logits.stride(0), vocab_size, num_blocks,
        K=k, K_PAD=k_pad, BLOCK=block, BLOCKS_PAD=blocks_pad, PDL=pdl, num_warps=FIND_WARPS, **options,
    )  # fmt: skip


def top_words(logits: Tensor, k: int) -> Tensor:
    """The words [n, 2k + 1] of ``logits [n, V]`` float32, on the same device."""
    num_rows, vocab_size = logits.shape
    words, scratch = new_words(num_rows, k, logits.device), new_scratch(num_rows, vocab_size, logits.device)
    with torch.cuda.device_of(logits):
        launch_top_rows(logits, k, words, scratch)
    return words
