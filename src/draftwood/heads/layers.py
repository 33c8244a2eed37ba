"""Building blocks of heads: norms, rotation, and decoder layers whose attention the caller passes in."""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from draftwood.heads.config import HeadConfig
from draftwood.targets import Attend
from draftwood.targets.native import HEAD_ROWS, inverse_frequencies, rms_norm, rotate


class Angles(NamedTuple):
    """The rotation of each position, computed once for all layers."""

    cos: Tensor  # [..., N, 1, D]
    sin: Tensor  # [..., N, 1, D]


class Rotation:
    """Computes angles. Not a module: converting a head to another dtype must not round its frequencies."""

    def __init__(self, config: HeadConfig) -> None:
        with torch.device("cpu"):  # heads are also built on "meta", where tensors have no values
            frequencies = inverse_frequencies(config.rope, config.head_dim)  # [D/2]
        self._by_device = {frequencies.device: frequencies}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        device = positions.device
        if device not in self._by_device:
            self._by_device[device] = next(iter(self._by_device.values())).to(device)
        angles = positions.float()[..., None] * self._by_device[device]  # [..., N, D/2]
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]  # [..., N, 1, D]
        return Angles(angles.cos().to(dtype), angles.sin().to(dtype))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Projections, norms and rotation around ``attend``."""

    def __init__(self, config: HeadConfig, input_size: int) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(input_size, heads * dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(input_size, kv_heads * dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(input_size, kv_heads * dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.head_dim = dim

    def forward(self, x: Tensor, angles: Angles, attend: Attend, layer: int) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )  # [..., N, heads or kv_heads, D]
        query = rotate(self.q_norm(query), *angles)
        key = rotate(self.k_norm(key), *angles)
        mixed: Tensor = self.o_proj(attend(layer, query, key, value).flatten(-2))
        return mixed


class FeedForward(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """A Llama decoder layer. Without ``input_norm`` attention reads the hidden state unnormed."""

    def __init__(self, config: HeadConfig, index: int, *, input_size: int = 0, input_norm: bool = True) -> None:
        super().__init__()
        size = config.hidden_size
        self.index = index
        self.self_attn = Attention(config, input_size or size)
        self.mlp = FeedForward(size, config.intermediate_size)
        self.input_layernorm = RMSNorm(size, config.norm_eps) if input_norm else nn.Identity()
        self.post_attention_layernorm = RMSNorm(size, config.norm_eps)

    def forward(self, hidden: Tensor, angles: Angles, attend: Attend) -> Tensor:
        return self.run(self.input_layernorm(hidden), hidden, angles, attend)

    def run(self, attended: Tensor, residual: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Run with ``attended`` as the input of attention and ``residual`` as its residual."""
        hidden = residual + self.self_attn(attended, angles, attend, self.index)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class ResidualBlock(nn.Module):
    """``x + silu(linear(x))``: the identity while the linear map is zero."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


def float_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Float32 logits ``[..., V]`` from weights of any dtype: rounding to half precision would create ties.

    With gradients, the product is computed in the dtype of the weights and then converted.
    """
    half = weight.dtype in (torch.bfloat16, torch.float16)
    trained = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if trained or not half:
        return F.linear(hidden, weight, bias).float()
    if weight.is_cuda:
        rows = hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype)  # autocast does not handle out_dtype
        logits = torch.mm(rows, weight.t(), out_dtype=torch.float32).view(*hidden.shape[:-1], len(weight))
    else:
        wide = hidden.float()
        logits = torch.cat([F.linear(wide, part.float()) for part in torch.split(weight, HEAD_ROWS)], dim=-1)
    return logits if bias is None else logits + bias
