"""Loads the weights of a Llama-family model from safetensors and checks them against the configuration.

Query, key and value projections are joined into one matrix, gate and up into another: they have the same input.
Matrices can be quantised to 8 bits as they are read; embeddings, norms and biases stay as they are.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from draftwood.errors import ModelError
from draftwood.models import ModelConfig, tensor_shapes
from draftwood.targets.base import TargetParts
from draftwood.targets.native.quantize import Matrix, Stored, num_weights, quantize_matrix

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LoadProgress = Callable[[int, int], None]  # layers read, layers in total
Lookup = Callable[[str], torch.Tensor]
Store = Callable[[torch.Tensor], Matrix]  # converts a matrix to the form it is kept in


@dataclass(slots=True)
class LayerWeights:
    input_norm: torch.Tensor  # [H]
    qkv: Matrix  # [(heads + 2 * kv_heads) * head_dim, H]
    qkv_bias: torch.Tensor | None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    o: Matrix  # [H, heads * head_dim]
    o_bias: torch.Tensor | None  # [H]
    post_norm: torch.Tensor  # [H]
    gate_up: Matrix  # [2 * I, H], the gates first
    down: Matrix  # [H, I]


@dataclass(slots=True)
class Weights:
    embed: torch.Tensor  # [V, H]
    layers: list[LayerWeights]
    norm: torch.Tensor  # [H]
    head: Matrix  # [V, H]; if tied, the same tensor as embed, or an 8-bit copy of it
    tied: bool  # the head shares the parameters of embed
    stored_embed: Stored | None = None  # instead of embed, which then has no rows

    def num_parameters(self) -> int:
        embed = self.embed if self.stored_embed is None else self.stored_embed
        matrices = [embed, self.norm, *(m for layer in self.layers for m in _matrices(layer))]
        if not self.tied:
            matrices.append(self.head)
        return sum(map(num_weights, matrices))


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: LoadProgress | None = None,
    quantize: str | None = None,
) -> Weights:
    """Reads every tensor of the configuration; raises an error that names missing, extra or misshapen ones."""
    with open_weights(folder, config) as lookup:
        return assemble(config, lambda name: lookup(name).to(device=device, dtype=dtype), progress, quantize)


@contextmanager
def open_weights(folder: Path, config: ModelConfig) -> Iterator[Lookup]:
    """Opens the weight files; raises an error that names missing and extra tensors."""
    with ExitStack() as stack:
        lookup, names = _open(folder, stack)
        _check_names(names, config, folder)
        yield lookup


def has_dense_weights(folder: Path) -> bool:
    """Whether the folder has weight files; they are not checked."""
    return (folder / SINGLE).exists() or (folder / INDEX).exists()


def load_dense_parts(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> TargetParts:
    """Reads the parts that draft heads use; needed if the decoder has packed the weights."""
    with ExitStack() as stack:
        lookup, found = _open(folder, stack)
        names = ["model.embed_tokens.weight", "model.norm.weight"]
        names.append(names[0] if config.tied_embeddings else "lm_head.weight")
        _check_fit(set(names) - found, set(), folder)
        embed, norm, head = (lookup(name).to(device=device, dtype=dtype) for name in names)
    return TargetParts(embed, norm, embed if config.tied_embeddings else head, config.norm_eps)


def assemble(
    config: ModelConfig, get: Lookup, progress: LoadProgress | None = None, quantize: str | None = None
) -> Weights:
    """Joins named Hugging Face tensors into :class:`Weights`. ``quantize``: 8-bit format of the matrices."""

    def store(tensor: torch.Tensor) -> Matrix:
        return tensor if quantize is None else quantize_matrix(tensor, quantize)

    checked = check_shapes(config, get)
    embed = checked("model.embed_tokens.weight")
    layers = []
    for index in range(config.num_layers):
        layers.append(_read_layer(config, checked, store, index))
        if progress is not None:
            progress(index + 1, config.num_layers)
    head = embed if config.tied_embeddings else checked("lm_head.weight")
    return Weights(embed, layers, checked("model.norm.weight"), store(head), config.tied_embeddings)


class LayerNames(NamedTuple):
    """The Hugging Face names of the tensors of a layer, as :class:`LayerWeights` joins them."""

    input_norm: str
    qkv: list[str]
    qkv_biases: list[str]
    q_norm: str
    k_norm: str
    o: str
    o_bias: str
    post_norm: str
    gate_up: list[str]
    down: str


def tensor_names(layer: int) -> LayerNames:
    prefix = f"model.layers.{layer}."
    return LayerNames(
        input_norm=f"{prefix}input_layernorm.weight",
        qkv=[f"{prefix}self_attn.{part}_proj.weight" for part in "qkv"],
        qkv_biases=[f"{prefix}self_attn.{part}_proj.bias" for part in "qkv"],
        q_norm=f"{prefix}self_attn.q_norm.weight",
        k_norm=f"{prefix}self_attn.k_norm.weight",
        o=f"{prefix}self_attn.o_proj.weight",
        o_bias=f"{prefix}self_attn.o_proj.bias",
        post_norm=f"{prefix}post_attention_layernorm.weight",
        gate_up=[f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up")],
        down=f"{prefix}mlp.down_proj.weight",
    )


def _read_layer(config: ModelConfig, get: Lookup, store: Store, index: int) -> LayerWeights:
    def join(parts: list[str]) -> torch.Tensor:
        return torch.cat([get(part) for part in parts])

    names = tensor_names(index)
    return LayerWeights(
        input_norm=get(names.input_norm),
        qkv=store(join(names.qkv)),
        qkv_bias=join(names.qkv_biases) if config.qkv_bias else None,
        q_norm=get(names.q_norm) if config.qk_norm else None,
        k_norm=get(names.k_norm) if config.qk_norm else None,
        o=store(get(names.o)),
        o_bias=get(names.o_bias) if config.o_bias else None,
        post_norm=get(names.post_norm),
        gate_up=store(join(names.gate_up)),
        down=store(get(names.down)),
    )


def check_shapes(config: ModelConfig, get: Lookup) -> Lookup:
    shapes = tensor_shapes(config)

    def checked(name: str) -> torch.Tensor:
        tensor = get(name)
        if tuple(tensor.shape) != shapes[name]:
            raise ModelError(
                f"The tensor {name} does not fit config.json", got=list(tensor.shape), allowed=[list(shapes[name])]
            )
        return tensor

    return checked


def _open(folder: Path, stack: ExitStack) -> tuple[Lookup, set[str]]:
    files: dict[str, Any] = {}
    for path in _shards(folder):
        try:
            handle = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path.name} cannot be read", got=error, next_step=f"Fetch it again. It is in {folder}."
            ) from error
        files |= dict.fromkeys(handle.keys(), handle)
    return lambda name: files[name].get_tensor(name), set(files)


def _shards(folder: Path) -> Iterator[Path]:
    index = folder / INDEX
    if index.exists():
        yield from sorted({folder / name for name in _weight_map(index).values()})
    elif (folder / SINGLE).exists():
        yield folder / SINGLE
    else:
        raise ModelError(
            "The model folder has no weights",
            got=folder,
            allowed=f"{SINGLE}, or {INDEX} with its shards",
            next_step="Save the model as safetensors, or give another folder.",
        )


def _weight_map(index: Path) -> dict[str, str]:
    """Reads which file holds which tensor, from the index of a sharded model."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{index} is not valid JSON", got=error, next_step="Fetch the model again.") from error
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ModelError(
            f"{index} does not say which file holds which tensor",
            allowed="an object with a weight_map from tensor names to file names",
            next_step="Fetch the model again.",
        )
    return files


def _check_names(names: set[str], config: ModelConfig, folder: Path) -> None:
    wanted = set(tensor_shapes(config))
    # A tied head may be stored anyway, and old checkpoints contain rotary buffers: neither is a separate weight.
    extra = {n for n in names - wanted if not n.endswith("rotary_emb.inv_freq")} - {"lm_head.weight"}
    _check_fit(wanted - names, extra, folder)


def _check_fit(missing: set[str], extra: set[str], folder: Path) -> None:
    if missing or extra:
        raise ModelError(
            f"The weights in {folder} do not fit config.json",
            got="; ".join(
                f"{label}: {', '.join(sorted(group)[:6])}{' ...' if len(group) > 6 else ''}"
                for label, group in (("missing", missing), ("unknown", extra))
                if group
            ),
        )


def _matrices(layer: LayerWeights) -> list[Matrix]:
    values = (getattr(layer, name) for name in LayerWeights.__slots__)
    return [value for value in values if value is not None]
