"""Quantises matrices to the block formats of GGUF files, for the fused CPU decoder."""

from collections.abc import Callable

import torch

BLOCK, SUPER = 32, 256
AT_ONCE = 1 << 18  # weights that are quantised at a time
STEPS = 8  # scales tried per block of Q4_K
FEW_STEPS = 3  # of Q4_1, which heads get while they are loaded: a third of the time for 1% more error


def choose_format(name: str, inputs: int, *, is_table: bool) -> str:
    """Returns the block format for a matrix under ``--quantize name``.

    Embeddings and head stay in 8 bits: they are few bytes of a large model and matter most for its quality. Blocks
    must fill the rows, so some matrices get a format of smaller blocks, or stay in bfloat16.
    """
    if inputs % BLOCK:
        return "BF16"
    wanted = name.upper()
    return "Q8_0" if is_table or (wanted == "Q4_K" and inputs % SUPER) else wanted


def quantize_rows(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Returns ``weight [rows, inputs]`` in blocks, as bytes ``[rows, bytes of a row]``."""
    if name == "BF16":
        return weight.to(torch.bfloat16).contiguous().view(torch.uint8)
    encode, size = _ENCODERS[name]
    parts = torch.split(weight, max(AT_ONCE // weight.shape[1], 1))  # the temporary tensors of a part fit into caches
    return torch.cat([encode(part.float().reshape(-1, size)).reshape(len(part), -1) for part in parts])


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    scale = _to_half(blocks.abs().amax(dim=1, keepdim=True) / 127)
    codes = (blocks * _inverse(scale)).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([_half_bytes(scale), codes.view(torch.uint8)], dim=1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """The weight of the largest magnitude becomes code 0, which is -8."""
    largest = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    scale = _to_half(largest / -8)
    codes = (blocks * _inverse(scale)).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    return torch.cat([_half_bytes(scale), codes[:, :16] | codes[:, 16:] << 4], dim=1)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    scale, minimum = (_to_half(values[:, None]) for values in _fit(blocks, FEW_STEPS))  # [n, 1]
    codes = ((blocks + minimum) * _inverse(scale)).round_().clamp_(0, 15).to(torch.uint8)
    return torch.cat([_half_bytes(scale), _half_bytes(-minimum), codes[:, :16] | codes[:, 16:] << 4], dim=1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    parts = blocks.view(-1, 8, BLOCK)
    scales, minima = _fit(parts, STEPS)  # [n, 8]
    scale, minimum = (_to_half(values.amax(dim=1, keepdim=True) / 63) for values in (scales, minima))
    whole_scales, whole_minima = (
        (values * _inverse(largest)).round_().clamp_(0, 63) for values, largest in ((scales, scale), (minima, minimum))
    )
    real_scales, real_minima = (whole_scales * scale)[..., None], (whole_minima * minimum)[..., None]
    codes = ((parts + real_minima) * _inverse(real_scales)).round_().clamp_(0, 15).to(torch.uint8)
    low, high = codes[:, 0::2], codes[:, 1::2]
    packed = (low | high << 4).reshape(len(blocks), 128)
    six = _pack_six_bits(whole_scales.to(torch.uint8), whole_minima.to(torch.uint8))
    return torch.cat([_half_bytes(scale), _half_bytes(minimum), six, packed], dim=1)


def _fit(parts: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales and minima (subtracted, not negative) of blocks ``[..., 32]``: the best of several fits.

    Errors of large weights count more.
    """
    weight = parts.abs() + parts.square().mean(dim=-1, keepdim=True).sqrt_()
    low = parts.amin(dim=-1, keepdim=True).clamp_(max=0)
    span = parts.amax(dim=-1, keepdim=True) - low
    best_scale, best_minimum, best_error = span / 15, -low, torch.full_like(span, float("inf"))
    total, sum_x = weight.sum(dim=-1, keepdim=True), (weight * parts).sum(dim=-1, keepdim=True)
    for step in range(steps):
        codes = ((parts - low) * _inverse(span / (14 + 2 * step / steps))).round_().clamp_(0, 15)
        sum_c, sum_cc = (weight * codes).sum(-1, keepdim=True), (weight * codes.square()).sum(-1, keepdim=True)
        sum_cx = (weight * codes * parts).sum(-1, keepdim=True)
        spread = total * sum_cc - sum_c.square()
        scale = (total * sum_cx - sum_x * sum_c) * _inverse(spread)
        minimum = (sum_c * sum_cx - sum_cc * sum_x) * _inverse(spread)
        scale = torch.where(minimum < 0, sum_cx * _inverse(sum_cc), scale)
        minimum.clamp_(min=0)
        error = (weight * (codes * scale - minimum - parts).square()).sum(-1, keepdim=True)
        better = (error < best_error) & (scale > 0)
        best_scale, best_minimum = torch.where(better, scale, best_scale), torch.where(better, minimum, best_minimum)
        best_error = torch.where(better, error, best_error)
    return best_scale.squeeze(-1), best_minimum.squeeze(-1)


def _pack_six_bits(scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """Packs 8 scales and 8 minima of six bits into 12 bytes; see the reader of the format."""
    first, second = scales[:, :4] | scales[:, 4:] >> 4 << 6, minima[:, :4] | minima[:, 4:] >> 4 << 6
    return torch.cat([first, second, scales[:, 4:] & 15 | minima[:, 4:] << 4], dim=1)


def _to_half(values: torch.Tensor) -> torch.Tensor:
    return values.half().float()


def _half_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.half().view(torch.uint8)


def _inverse(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values == 0, 0.0, 1 / values)


_ENCODERS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "Q8_0": (_q8_0, BLOCK),
    "Q4_0": (_q4_0, BLOCK),
    "Q4_1": (_q4_1, BLOCK),
    "Q4_K": (_q4_k, SUPER),
}
