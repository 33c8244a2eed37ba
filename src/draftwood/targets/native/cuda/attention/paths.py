"""The way from each row to the root of its tree, from its ancestor bits."""

# ruff: noqa: N803 - compile-time arguments are in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl


@triton.jit
def write_path(words, afters, paths, row, W: tl.constexpr, BITS: tl.constexpr, PATH: tl.constexpr):
    """Turn a row's ancestor bits into its path [PATH]: the node itself, its parent, and so on up the tree.

    Rows without bits (chains, padding) are left alone. Nodes are numbered from the root of the tree.
    """
    after = tl.load(afters + row)
    earlier = tl.cdiv(after, 32)  # words at the end, for nodes of earlier passes, which come first
    bit = tl.arange(0, BITS)
    word = tl.where(bit // 32 < earlier, W - earlier + bit // 32, bit // 32 - earlier)
    there = bit < 32 * W
    mine = tl.load(words + row.to(tl.int64) * W + word, mask=there, other=0)
    node = tl.where(bit // 32 < earlier, bit, after + bit - 32 * earlier)
    is_set = tl.where(there, (mine >> (bit % 32)) & 1, 0)
    back = tl.sum(is_set, axis=0) - tl.cumsum(is_set, axis=0)  # nodes below it on the path
    tl.store(paths + row.to(tl.int64) * PATH + back, node.to(paths.dtype.element_ty), mask=is_set != 0)


@triton.jit
def _write_paths(words, afters, paths, W: tl.constexpr, BITS: tl.constexpr, PATH: tl.constexpr):
    write_path(words, afters, paths, tl.program_id(0), W, BITS, PATH)


def write_paths(words: torch.Tensor, afters: torch.Tensor, paths: torch.Tensor) -> None:
    """Fill ``paths [N, PATH]`` from ``words [N, W]``, see ``write_path``. Passes do so in their first kernel."""
    num_rows, num_words = words.shape
    bits = triton.next_power_of_2(32 * num_words)
    _write_paths[(num_rows,)](words, afters, paths, W=num_words, BITS=bits, PATH=paths.shape[1])
