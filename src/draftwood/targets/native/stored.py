"""Weights in the blocks of a GGUF file, or quantised to such blocks: the fused CPU decoder multiplies them as they are.

Nothing is read before it is packed: a matrix here is the place of its values in a file, which must stay open.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from draftwood.models import GgufFile, ModelConfig, StoredTensor, stored_file, stored_tensors, tensor_shapes
from draftwood.targets.base import TargetParts
from draftwood.targets.native.block_formats import choose_format, quantize_rows
from draftwood.targets.native.quantize import Stored
from draftwood.targets.native.weights import (
    LayerWeights,
    Lookup,
    Weights,
    check_shapes,
    has_dense_weights,
    load_dense_parts,
    tensor_names,
)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


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


def quantized_tensors(config: ModelConfig, get: Lookup, quantize: str) -> dict[str, StoredTensor]:
    """Describes the tensors of a model as if a file had them in a block format: they are quantised as they are read."""
    checked = check_shapes(config, get)

    def floats(name: str) -> Floats:
        return checked(name).float().numpy()

    def blocks(name: str, kind: str) -> Bytes:
        return quantize_rows(checked(name), kind).numpy()

    tensors = {}
    for name, shape in tensor_shapes(config).items():
        is_table = name in ("model.embed_tokens.weight", "lm_head.weight")
        kind = choose_format(quantize, shape[1], is_table=is_table) if len(shape) == 2 else "F32"
        tensors[name] = StoredTensor(kind, shape, partial(blocks, name, kind), partial(floats, name))
    return tensors


def stored_formats(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Returns the formats of the matrices, that of most weights first."""
    counts: Counter[str] = Counter()
    for tensor in tensors.values():
        if len(tensor.shape) == 2:
            counts[tensor.format] += prod(tensor.shape)
    return [name for name, _ in counts.most_common()]


def has_weights(folder: Path) -> bool:
    """Whether the folder has weights in any form; they are not checked."""
    return has_dense_weights(folder) or stored_file(folder) is not None


def load_parts(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> TargetParts:
    """Reads the parts that draft heads use; needed if the decoder has packed the weights."""
    path = stored_file(folder)
    if path is None:
        return load_dense_parts(folder, config, dtype, device)
    embed, norm, head, eps = load_stored_parts(path, config, dtype)
    return TargetParts(embed.to(device), norm.to(device), head.to(device), eps)


def load_stored_parts(path: Path, config: ModelConfig, dtype: torch.dtype) -> TargetParts:
    """Reads the parts that draft heads use from a GGUF file, expanded to ``dtype``."""
    with GgufFile(path) as file:
        tensors = stored_tensors(file, config)
        names = ["model.embed_tokens.weight", "model.norm.weight"]
        if not config.tied_embeddings:
            names.append("lm_head.weight")
        embed, norm, *head = (torch.from_numpy(tensors[name].floats()).to(dtype) for name in names)
    return TargetParts(embed, norm, head[0] if head else embed, config.norm_eps)
