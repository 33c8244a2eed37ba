"""The kernels that a decoder with features has beside those of others: one row a program."""

# ruff: noqa: N803 - compile-time values are in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftwood.targets.native.cuda.common import normed, wait_for_input

WARPS = 8  # a row is a few thousand numbers, and nobody else has work meanwhile


@triton.jit
def _join(
    ids, sources, table, left, given, token_norm, feature_norm, joined, states, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr, KEEPS_NORMED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < H
    token_id = tl.load(ids + row).to(tl.int64)
    source = tl.load(sources + 1 + row, mask=row < tl.load(sources), other=-1).to(tl.int64)
    token = tl.load(table + token_id * H + at, mask=inside, other=0.0)
    feature = tl.load(left + source * H + at, mask=inside & (source >= 0), other=0.0)
    if GIVEN:
        own = tl.load(given + row.to(tl.int64) * H + at, mask=inside & (source < 0), other=0.0)
        feature = tl.where(source < 0, own, feature)
    kept = feature
    if NORMED:
        token = normed(token, token_norm, at, inside, eps, H)
        feature = normed(feature, feature_norm, at, inside, eps, H)
        if KEEPS_NORMED:
            kept = feature
        tl.store(states + row * H + at, kept, mask=inside)
    tl.store(joined + row * (2 * H) + at, token, mask=inside)
    tl.store(joined + row * (2 * H) + H + at, feature, mask=inside)


@triton.jit
def _leave(
    states, norm, slots, left, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < H
    slot = tl.load(slots + row).to(tl.int64)
    wait_for_input(PDL)
    if slot < 0:  # a row that only fills up the pass
        return
    x = tl.load(states + row * H + at, mask=inside, other=0.0)
    if NORMED:
        x = normed(x, norm, at, inside, eps, H)
    tl.store(left + slot * H + at, x, mask=inside)


def join(
    ids: torch.Tensor,
    sources: torch.Tensor,
    table: torch.Tensor,
    left: torch.Tensor,
    given: torch.Tensor | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    joined: torch.Tensor,
    states: torch.Tensor,
    eps: float,
    *,
    keeps_normed: bool,
) -> None:
    """Tokens and features side by side, ``joined [N, 2H]``. With ``norms`` (of tokens, of features) both are normed,
    and the features, normed if ``keeps_normed``, go to ``states [N, H]`` too.

    ``sources``: how many rows are in use, then for each the slot of ``left [slots, H]`` that its feature lies in; below
    0: its row of ``given [N, H]``. Rows that only fill up the pass have the feature 0, or whatever is given.
    """
    width = table.shape[1]
    token_norm, feature_norm = norms or (None, None)
    _join[(len(ids),)](
        ids, sources, table, left, given, token_norm, feature_norm, joined, states, eps,
        H=width, BLOCK=triton.next_power_of_2(width), NORMED=norms is not None, KEEPS_NORMED=keeps_normed,
        GIVEN=given is not None, num_warps=WARPS,
    )  # fmt: skip


def leave(
    states: torch.Tensor,
    norm: torch.Tensor | None,
    slots: torch.Tensor,
    left: torch.Tensor,
    eps: float,
    *,
    pdl: bool,
) -> None:
    """Rows of ``states [N, H]``, normed if there is a ``norm``, go to their ``slots`` of ``left [slots, H]``.

    A row whose slot is below 0 leaves nothing.
    """
    width = states.shape[1]
    _leave[(len(slots),)](
        states, norm, slots, left, eps,
        H=width, BLOCK=triton.next_power_of_2(width), NORMED=norm is not None, PDL=pdl, num_warps=WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
