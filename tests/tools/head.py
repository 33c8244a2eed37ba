"""Shared by tests of draft heads: random heads and parts of targets, and simple attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwood.heads import Eagle3Head, HeadModule, build_head, default_head_config, save_head
from draftwood.models.config import ModelConfig, Rope
from draftwood.targets import TargetParts

Tensors = dict[str, Tensor]

# Deep enough for the published taps, with grouped heads of an independent size.
SMALL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=40,
    hidden_size=24,
    intermediate_size=36,
    num_layers=9,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    norm_eps=1e-5,
    context_length=128,
    rope=Rope(theta=500.0),
    tied_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    qk_norm=False,
)


def random_parts(model: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> TargetParts:
    """Embeddings, final norm and lm_head of an imaginary target."""
    generator = torch.Generator().manual_seed(seed)
    embed, head = torch.randn(2, model.vocab_size, model.hidden_size, generator=generator, dtype=dtype)
    norm = 1.0 + 0.3 * torch.randn(model.hidden_size, generator=generator, dtype=dtype)
    return TargetParts(embed, norm, head, model.norm_eps)


def random_head(
    kind: str, model: ModelConfig, seed: int = 0, *, dtype: torch.dtype = torch.float32, **changes: Any
) -> HeadModule:
    """A head for this target with random parameters and a random vocabulary; not yet bound.

    ``changes`` go to ``default_head_config``.
    """
    generator = torch.Generator().manual_seed(seed)
    head = build_head(default_head_config(kind, model, **changes))
    head.reset_parameters(generator)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    if isinstance(head, Eagle3Head) and head.config.has_draft_vocabulary:
        chosen = torch.randperm(model.vocab_size, generator=generator)[: head.config.draft_vocab_size]
        head.set_vocabulary(chosen.sort().values)
    return head.to(dtype).eval()


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every position attends to itself and earlier ones."""
    query, key, value = (x.transpose(-2, -3) for x in (query, key, value))  # [..., heads, N, D]
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return mixed.transpose(-2, -3)


class GrowingCache:
    """An ``attend`` for successive steps: new positions attend to all earlier ones, and to each other causally."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer in self._rows:
            old_key, old_value = self._rows[layer]
            key, value = torch.cat([old_key, key], dim=-3), torch.cat([old_value, value], dim=-3)
        self._rows[layer] = (key, value)
        num_new, num_all = query.shape[-3], key.shape[-3]
        visible = torch.ones(num_new, num_all, dtype=torch.bool).tril(num_all - num_new)
        query, key, value = (x.transpose(-2, -3) for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)
        return mixed.transpose(-2, -3)


def written(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """config.json and the tensors of a folder, read without the code under test."""
    names = [path.name for path in folder.iterdir() if path.name != "config.json"]
    assert len(names) == 1
    file = folder / names[0]
    tensors = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    return json.loads((folder / "config.json").read_text()), tensors


def rewrite(folder: Path, change: Callable[[dict[str, Any], Tensors], None]) -> Path:
    """Rewrite the folder with changed content, as safetensors."""
    content, tensors = written(folder)
    for path in folder.iterdir():
        path.unlink()
    change(content, tensors)
    (folder / "config.json").write_text(json.dumps(content))
    save_file({name: t.clone() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def saved(tmp_path: Path, kind: str, to: str, **changes: Any) -> tuple[HeadModule, Path]:
    head = random_head(kind, SMALL, target_name="org/target", **changes)
    return head, save_head(head, tmp_path / "head", to=to)


def gives_same_logits(head: HeadModule, other: HeadModule) -> bool:
    parts, tokens = random_parts(SMALL), torch.tensor([1, 5, 9])
    answers = []
    for each in (head, other):
        each.bind(parts)
        taps = torch.randn(3, each.config.num_taps * SMALL.hidden_size, generator=torch.Generator().manual_seed(0))
        features = each.fuse(taps)
        if hasattr(each, "logits_at"):
            hidden = each(features, torch.arange(3), causal)
            answers.append(each.logits_at(2, hidden, each.embed(tokens)[:, None].expand(3, 2, -1)))
        else:
            answers.append(each.logits(each(each.embed(tokens), features, torch.arange(3), causal)))
    return torch.equal(*answers)
