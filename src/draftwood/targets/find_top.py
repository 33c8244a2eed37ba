"""The best few entries of many rows of logits at once, and what they are worth as probabilities.

A cycle verifies dozens of nodes over a vocabulary of tens of thousands; of every row only a handful of successors is of
interest. On a CPU one call into the kernel reads each row once. On a GPU kernels of Triton do, elsewhere torch finds
them on the device; only they travel to the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from draftwood.errors import OptionError
from draftwood.targets.native.cpu import load_kernel
from draftwood.targets.toprows import MAX_TOP_K, TopRows


def top_rows(logits: torch.Tensor, k: int, rows: Sequence[int] | None = None) -> TopRows:
    """The ``k`` best entries of every row of ``logits [n, V]``, or of some of its ``rows``, in that order.

    The order is the same on every path: by logit, equal logits by id, also across the edge of what is returned. NaN
    counts as minus infinity. ``log_total`` is within 1e-4 of the exact value. In the kernel a row's result does not
    depend on the other rows or on the number of threads, to the last bit.
    """
    vocab_size = logits.shape[1]
    num_rows = len(logits) if rows is None else len(rows)
    if not 1 <= k <= vocab_size:
        raise OptionError("The best k entries of a row were asked for", got=f"k {k}", allowed=f"1 to {vocab_size}")
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


def _top_by_kernel(entry: Callable[..., None], logits: torch.Tensor, k: int, rows: Sequence[int] | None) -> TopRows:
    vocab_size = logits.shape[1]
    num_rows = len(logits) if rows is None else len(rows)
    chosen = None if rows is None else (ctypes.c_int64 * num_rows)(*rows)
    row_stride, stride = logits.stride()
    if stride != 1:
        logits = logits.contiguous()
        row_stride = vocab_size
    # One piece of memory for the three results: asking an array for its address takes longer than making it.
    size = num_rows * k
    words = np.empty(2 * size + num_rows, np.int32)
    ids = ctypes.addressof(ctypes.c_int32.from_buffer(words.data))
    values, log_total = ids + 4 * size, ids + 8 * size
    threads = torch.get_num_threads()
    entry(logits.data_ptr(), chosen, num_rows, row_stride, vocab_size, k, ids, values, log_total, threads)
    return TopRows(
        np.ndarray((num_rows, k), np.int32, words),
        np.ndarray((num_rows, k), np.float32, words, 4 * size),
        np.ndarray(num_rows, np.float32, words, 8 * size),
    )


@lru_cache(maxsize=1)
def _entry(kernel: ctypes.CDLL) -> Callable[..., None]:
    """The kernel's function with its signature, which is looked up once."""
    entry = kernel.draftwood_top_rows
    entry.restype = None
    entry.argtypes = (*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 4, *[ctypes.c_void_p] * 3, ctypes.c_int)
    return entry


@lru_cache
def _words_on(device: torch.device) -> Callable[[torch.Tensor, int], torch.Tensor] | None:
    """What finds the best entries on a device, as words; None without kernels for it."""
    from draftwood.targets.native import cuda

    if device.type != "cuda" or cuda.why_not_on(device):
        return None
    from draftwood.targets.native.cuda.kernels import top_words

    return top_words


def _top_by_triton(words_of: Callable[[torch.Tensor, int], torch.Tensor], logits: torch.Tensor, k: int) -> TopRows:
    """All rows: reading one costs less than copying it, and what comes back is a few words each."""
    words = words_of(logits if logits.stride(1) == 1 else logits.contiguous(), k)
    return TopRows.from_words(words.cpu().numpy())


def _top_by_torch(logits: torch.Tensor, k: int) -> TopRows:
    """One batched topk and one transfer; a second look only at rows where a tie straddles the edge, and at NaN.

    Which of several equal entries topk returns, and in which order, is its own affair. Asking for one entry more shows
    whether the edge cuts through equals; inside the edge they are put in order here.
    """
    asked = min(k + 1, logits.shape[1])
    top = logits.topk(asked, dim=-1)
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    ids, values, totals = _to_host(top.indices, top.values, log_total)
    if np.isnan(totals).any() and bool(logits.isnan().any()):
        return _top_by_torch(logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), k)
    order = np.lexsort((ids, -values), axis=-1)
    ids, values = np.take_along_axis(ids, order, axis=-1), np.take_along_axis(values, order, axis=-1)
    if asked > k:
        _settle_ties_at_the_edge(logits, ids, values)
    return TopRows(np.ascontiguousarray(ids[:, :k]), np.ascontiguousarray(values[:, :k]), totals[:, 0])


def _to_host(
    ids: torch.Tensor, values: torch.Tensor, log_total: torch.Tensor
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The three, [n, k], [n, k] and [n, 1], in one transfer, as 32-bit words."""
    words = torch.cat((ids.to(torch.int32), values.view(torch.int32), log_total.view(torch.int32)), dim=1)
    host = words.cpu().numpy()
    k = ids.shape[1]
    return host[:, :k], host[:, k : 2 * k].view(np.float32), host[:, 2 * k :].view(np.float32)


def _settle_ties_at_the_edge(logits: torch.Tensor, ids: npt.NDArray[np.int32], values: npt.NDArray[np.float32]) -> None:
    """Rewrites ``ids [n, k + 1]``: where the last two entries are equal, their equals of lowest id come in."""
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
