"""The parameters of an EAGLE head as the decoders of the native target need them.

q, k and v are merged into one matrix, gate and up projections into another. The module's parameters become views of
these, so nothing is stored twice.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from draftwood.heads import DecoderLayer, HeadConfig, RMSNorm
from draftwood.models import ModelConfig
from draftwood.targets.native import LayerWeights


def decoder_config(config: HeadConfig) -> ModelConfig:
    """The layers of a head as a model configuration."""
    return ModelConfig(
        architecture=config.kind,
        vocab_size=config.draft_vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        context_length=config.context_length,
        rope=config.rope,
        tied_embeddings=False,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        qk_norm=config.qk_norm,
    )


def layer_weights(layer: nn.Module) -> LayerWeights:
    assert isinstance(layer, DecoderLayer)
    attention, mlp, size = layer.self_attn, layer.mlp, layer.mlp.down_proj.out_features
    norm = _norm(layer.input_layernorm)
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    return LayerWeights(
        input_norm=attention.o_proj.weight.new_ones(size) if norm is None else norm,  # unused if the layer has none
        qkv=_merge([linear.weight for linear in qkv]),
        qkv_bias=_merge([linear.bias for linear in qkv]) if attention.q_proj.bias is not None else None,
        q_norm=_norm(attention.q_norm),
        k_norm=_norm(attention.k_norm),
        o=attention.o_proj.weight.detach(),
        o_bias=bias_of(attention.o_proj),
        post_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=_merge([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight.detach(),
    )


def _merge(parameters: Sequence[Tensor]) -> Tensor:
    """Concatenate parameters; they become views of the result."""
    whole = torch.cat([parameter.detach() for parameter in parameters])
    parts = torch.split(whole, [len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return whole


def bias_of(linear: nn.Linear) -> Tensor | None:
    return None if linear.bias is None else linear.bias.detach()


def _norm(module: nn.Module) -> Tensor | None:
    return module.weight.detach() if isinstance(module, RMSNorm) else None
