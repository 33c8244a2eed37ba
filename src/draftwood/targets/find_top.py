"""Finds the top k entries of many rows of logits, with the log of the sum of exponentials of each row.

On a CPU, one call into the kernel reads each row once. On a GPU, Triton kernels do. Elsewhere torch finds them on the
device. Only the results are copied to the host.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from draftwood.errors import OptionError
from draftwood.targets.native.cpu import load_kernel
from draftwood.targets.toprows import MAX_TOP_K, KernelRows, TopRows


def top_rows(logits: torch.Tensor, k: int, rows: Sequence[int] | None = None) -> TopRows:
    """Finds the top ``k`` entries of every row of ``logits [n, V]``, or of the given ``rows``.

    All implementations select and order entries alike: by logit, ties by lower id. NaN counts as minus infinity.
    ``log_total`` is within 1e-4 of the exact value. In the CPU kernel, a row's result does not depend on the other
    rows or on the number of threads, bit for bit.
    """
    vocab_size = logits.shape[1]
    num_rows = len(logits) if rows is None else len(rows)
    if not 1 <= k <= vocab_size:
        raise OptionError("top_k is out of range", got=k, allowed=f"1 to {vocab_size}")
    if rows and not 0 <= min(rows) <= max(rows) < len(logits):
        raise IndexError(f"rows {min(rows)} to {max(rows)} of {len(logits)}")
    if logits.dtype != torch.float32:
        logits = logits.to(torch.float32)
    if logits.is_cpu and num_rows and k <= MAX_TOP_K:
        kernel = load_kernel()
        if kernel is not None:
            return _top_by_kernel(_entry(kernel), logits, k, rows)
    words_of = _words_on(logits.device)
    if words_of is not None and num_rows and k <= MAX_TOP_K:
        found = _top_by_triton(words_of, logits.detach(), k)
        return found if rows is None else found.at(list(rows))
    return _top_by_torch(logits.detach() if rows is None else logits.detach()[list(rows)], k)


def _top_by_kernel(entry: Callable[..., int], logits: torch.Tensor, k: int, rows: Sequence[int] | None) -> TopRows:
    vocab_size = logits.shape[1]
    num_rows = len(logits) if rows is None else len(rows)
    chosen = None if rows is None else (ctypes.c_int64 * num_rows)(*rows)
    row_stride, stride = logits.stride()
    if stride != 1:
        logits = logits.contiguous()
        row_stride = vocab_size
    # One allocation for all results: getting the address of an array takes longer than allocating it.
    words = np.empty(KernelRows.num_words(num_rows, k), np.int32)
    results = ctypes.addressof(ctypes.c_int32.from_buffer(words.data))
    threads = torch.get_num_threads()
    if entry(logits.data_ptr(), chosen, num_rows, row_stride, vocab_size, k, results, threads):
        raise MemoryError(f"top entries of {num_rows} rows")
    return KernelRows.in_words(words, num_rows, k)


@lru_cache(maxsize=1)
def _entry(kernel: ctypes.CDLL) -> Callable[..., int]:
    """Returns the kernel's function with its signature, looked up once."""
    entry = kernel.draftwood_top_rows
    entry.restype = ctypes.c_int
    entry.argtypes = (*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 4, ctypes.c_void_p, ctypes.c_int)
    return entry


@lru_cache
def _words_on(device: torch.device) -> Callable[[torch.Tensor, int], torch.Tensor] | None:
    """Returns the Triton function that finds the top entries on a device, or None."""
    from draftwood.targets.native import cuda

    if device.type != "cuda" or cuda.why_not_on(device):
        return None
    from draftwood.targets.native.cuda.kernels import top_words

    return top_words


def _top_by_triton(words_of: Callable[[torch.Tensor, int], torch.Tensor], logits: torch.Tensor, k: int) -> TopRows:
    """Computes all rows: reading a row costs less than copying it, and the results are small."""
    words = words_of(logits if logits.stride(1) == 1 else logits.contiguous(), k)
    return TopRows.from_words(words.cpu().numpy())


def _top_by_torch(logits: torch.Tensor, k: int) -> TopRows:
    """One batched topk and one transfer; rows with a tie at the boundary, and NaN, take a second step.

    topk does not define which of several equal entries it returns, nor their order. One extra entry shows whether
    there is a tie at the boundary; the others are sorted here.
    """
    num_found = min(k + 1, logits.shape[1])
    top = logits.topk(num_found, dim=-1)
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    ids, values, totals = _to_host(top.indices, top.values, log_total)
    if np.isnan(totals).any() and bool(logits.isnan().any()):
        return _top_by_torch(logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), k)
    order = np.lexsort((ids, -values), axis=-1)
    ids, values = np.take_along_axis(ids, order, axis=-1), np.take_along_axis(values, order, axis=-1)
    if num_found > k:
        _resolve_boundary_ties(logits, ids, values)
    return TopRows(np.ascontiguousarray(ids[:, :k]), np.ascontiguousarray(values[:, :k]), totals[:, 0])


def _to_host(
    ids: torch.Tensor, values: torch.Tensor, log_total: torch.Tensor
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Copies the three, [n, k], [n, k] and [n, 1], in one transfer of 32-bit words."""
    words = torch.cat((ids.to(torch.int32), values.view(torch.int32), log_total.view(torch.int32)), dim=1)
    host = words.cpu().numpy()
    k = ids.shape[1]
    return host[:, :k], host[:, k : 2 * k].view(np.float32), host[:, 2 * k :].view(np.float32)


def _resolve_boundary_ties(logits: torch.Tensor, ids: npt.NDArray[np.int32], values: npt.NDArray[np.float32]) -> None:
    """Rewrites ``ids [n, k + 1]`` in place: of entries equal to the last two, those with the lowest ids are taken."""
    rows = np.flatnonzero(values[:, -1] == values[:, -2])
    if not len(rows):
        return
    tied_rows = logits[torch.from_numpy(rows).to(logits.device)]
    edge = torch.from_numpy(values[rows, -1:]).to(logits.device)
    vocab_size = logits.shape[1]
    places = torch.arange(vocab_size, dtype=torch.int32, device=logits.device)
    equals = torch.where(tied_rows == edge, places, vocab_size).topk(ids.shape[1], largest=False, sorted=True).values
    for row, lowest in zip(rows, equals.cpu().numpy(), strict=True):
        above = int((values[row] > values[row, -1]).sum())
        ids[row, above:] = lowest[: ids.shape[1] - above]
