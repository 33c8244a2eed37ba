"""Weights in the blocks of a GGUF file, which the fused CPU decoder multiplies as they are.

Nothing is read before it is packed: a matrix here is the place of its blocks in the file, which must stay open.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path

import torch

from draftwood.models import GgufFile, ModelConfig, StoredTensor, stored_tensors
from draftwood.targets.base import TargetParts
from draftwood.targets.native.quantize import Stored
from draftwood.targets.native.weights import LayerWeights, Weights, tensor_names


def assemble_stored(config: ModelConfig, tensors: dict[str, StoredTensor], dtype: torch.dtype) -> Weights:
    """Joins named tensors into :class:`Weights`. ``dtype``: of the cache and of hidden states."""

    def matrix(*names: str) -> Stored:
        return Stored(tuple(tensors[name] for name in names))

    def vector(*names: str) -> torch.Tensor:
        return torch.cat([torch.from_numpy(tensors[name].floats()) for name in names])

    def read_layer(index: int) -> LayerWeights:
        names = tensor_names(index)
        return LayerWeights(
            input_norm=vector(names.input_norm),
            qkv=matrix(*names.qkv),
            qkv_bias=vector(*names.qkv_biases) if config.qkv_bias else None,
            q_norm=vector(names.q_norm) if config.qk_norm else None,
            k_norm=vector(names.k_norm) if config.qk_norm else None,
            o=matrix(names.o),
            o_bias=vector(names.o_bias) if config.o_bias else None,
            post_norm=vector(names.post_norm),
            gate_up=matrix(*names.gate_up),
            down=matrix(names.down),
        )

    embed = matrix("model.embed_tokens.weight")
    return Weights(
        embed=torch.empty(0, config.hidden_size, dtype=dtype),
        layers=[read_layer(index) for index in range(config.num_layers)],
        norm=vector("model.norm.weight"),
        head=embed if config.tied_embeddings else matrix("lm_head.weight"),
        tied=config.tied_embeddings,
        stored_embed=embed,
    )


def stored_formats(path: Path, config: ModelConfig) -> list[str]:
    """Returns the formats of the matrices in a GGUF file, that of most weights first."""
    counts: Counter[str] = Counter()
    with GgufFile(path) as file:
        for tensor in stored_tensors(file, config).values():
            if len(tensor.shape) == 2:
                counts[tensor.format] += prod(tensor.shape)
    return [name for name, _ in counts.most_common()]


def load_stored_parts(path: Path, config: ModelConfig, dtype: torch.dtype) -> TargetParts:
    """Reads the parts that draft heads use, expanded to ``dtype``."""
    with GgufFile(path) as file:
        tensors = stored_tensors(file, config)
        names = ["model.embed_tokens.weight", "model.norm.weight"]
        if not config.tied_embeddings:
            names.append("lm_head.weight")
        embed, norm, *head = (torch.from_numpy(tensors[name].floats()).to(dtype) for name in names)
    return TargetParts(embed, norm, head[0] if head else embed, config.norm_eps)
