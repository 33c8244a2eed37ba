"""The extra kernels of a feature decoder, with one program per row."""

# ruff: noqa: N803 - compile-time values are in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from draftwood.targets.native.cuda.common import launch_options, rms_norm, wait_for_input

MAX_BLOCK = 1024
WARPS = 8  # a row is a few thousand numbers, and the rest of the GPU is idle


@triton.jit
def _gather(addresses, sources, given, T: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if (row < tl.load(sources)) & (tl.load(sources + 1 + row) < 0):
        states = tl.load(addresses + row).to(tl.pointer_type(given.dtype.element_ty))
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(given + row.to(tl.int64) * T + at, tl.load(states + at, mask=at < T, other=0.0), mask=at < T)


@triton.jit
def _join(
    ids, sources, table, feature_cache, given, token_norm, feature_norm, joined, states, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr, NORM_BEFORE_RESIDUAL: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < H
    token_id = tl.load(ids + row).to(tl.int64)
    source = tl.load(sources + 1 + row, mask=row < tl.load(sources), other=-1).to(tl.int64)
    token = tl.load(table + token_id * H + at, mask=inside, other=0.0)
    feature = tl.load(feature_cache + source * H + at, mask=inside & (source >= 0), other=0.0)
    if GIVEN:
        own = tl.load(given + row.to(tl.int64) * H + at, mask=inside & (source < 0), other=0.0)
        feature = tl.where(source < 0, own, feature)
    kept = feature
    if NORMED:
        token = rms_norm(token, token_norm, at, inside, eps, H)
        feature = rms_norm(feature, feature_norm, at, inside, eps, H)
        if NORM_BEFORE_RESIDUAL:
            kept = feature
        tl.store(states + row * H + at, kept, mask=inside)
    tl.store(joined + row * (2 * H) + at, token, mask=inside)
    tl.store(joined + row * (2 * H) + H + at, feature, mask=inside)


@triton.jit
def _store(
    states, norm, slots, feature_cache, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < H
    slot = tl.load(slots + row).to(tl.int64)
    wait_for_input(PDL)
    if slot < 0:  # a padding row
        return
    x = tl.load(states + row * H + at, mask=inside, other=0.0)
    if NORMED:
        x = rms_norm(x, norm, at, inside, eps, H)
    tl.store(feature_cache + slot * H + at, x, mask=inside)


def gather_states(addresses: Tensor, sources: Tensor, given: Tensor) -> None:
    """Copy the rows [T] at ``addresses`` to ``given [N, T]``, for the rows with a negative slot in ``sources``."""
    rows, width = given.shape
    block = min(triton.next_power_of_2(width), MAX_BLOCK)
    _gather[(rows, triton.cdiv(width, block))](addresses, sources, given, T=width, BLOCK=block, num_warps=4)


def join_features(
    ids: Tensor,
    sources: Tensor,
    table: Tensor,
    feature_cache: Tensor,
    given: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    joined: Tensor,
    states: Tensor,
    eps: float,
    *,
    norm_before_residual: bool,
) -> None:
    """Write token embeddings and features side by side to ``joined [N, 2H]``.

    With ``norms`` (of tokens, of features) both are normed. The features are then also written to ``states [N, H]``,
    normed if ``norm_before_residual``.

    ``sources`` holds the number of used rows, then each row's slot in ``feature_cache [slots, H]``. A negative slot
    selects the same row of ``given [N, H]``. Padding rows get the feature 0, or whatever is given.
    """
    width = table.shape[1]
    token_norm, feature_norm = norms or (None, None)
    _join[(len(ids),)](
        ids, sources, table, feature_cache, given, token_norm, feature_norm, joined, states, eps,
        H=width, BLOCK=triton.next_power_of_2(width), NORMED=norms is not None,
        NORM_BEFORE_RESIDUAL=norm_before_residual, GIVEN=given is not None, num_warps=WARPS,
    )  # fmt: skip


def store_features(
    states: Tensor, norm: Tensor | None, slots: Tensor, feature_cache: Tensor, eps: float, *, pdl: bool
) -> None:
    """Store the rows of ``states [N, H]``, normed if ``norm`` is set, in their slots of ``feature_cache [slots, H]``.

    Rows with a negative slot are not stored.
    """
    width = states.shape[1]
    _store[(len(slots),)](
        states, norm, slots, feature_cache, eps,
        H=width, BLOCK=triton.next_power_of_2(width), NORMED=norm is not None, PDL=pdl, num_warps=WARPS,
        **launch_options(pdl),
    )  # fmt: skip
