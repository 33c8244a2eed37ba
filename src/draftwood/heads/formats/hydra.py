"""Hydra heads as their authors lay them down: ``hydra_mlp.*`` and ``hydra_lm_head.*`` in ``hydra_lm_head.pt``.

With the prefix layer of Hydra++ there is a dropout before every part, which counts as a place of its own.
"""

from __future__ import annotations

from typing import Any

from draftwood.errors import CapabilityError
from draftwood.heads.config import HeadConfig, decoder_fields
from draftwood.heads.formats.fields import flag_objections, number, read_decoder, write_decoder
from draftwood.heads.formats.layout import Export, Json, Layout, Shapes, matrix_shape
from draftwood.models import ModelConfig

PREFIX = "prefix_embeding_layer."  # spelled so in the checkpoints


class HydraLayout(Layout):
    name = "hydra"
    kinds = ("hydra",)
    weights = "hydra_lm_head.pt"

    def recognises(self, content: Json, names: set[str]) -> bool:
        return "hydra_num_heads" in content

    def places(self, own: str, config: HeadConfig) -> tuple[str, ...]:
        if own.startswith("prefix."):
            return (PREFIX + own.removeprefix("prefix."),)
        _, branch, part, rest = own.split(".", 3)
        if part == "lm_head":
            return (f"hydra_lm_head.{branch}.{'1.' if config.num_layers else ''}{rest}",)
        blocks = [0] if part == "join" else range(1, config.num_residual)
        places = [2 * block + 1 if config.num_layers else block for block in blocks]
        return tuple(f"hydra_mlp.{branch}.{place}.{rest}" for place in places)

    def ignored(self, config: HeadConfig) -> Shapes:
        names = ("input_embed_fn.weight", f"{PREFIX}embed_tokens.weight")
        return dict.fromkeys(names, (config.vocab_size, config.hidden_size))

    def read_config(self, content: Json, shapes: Shapes, model: ModelConfig | None) -> HeadConfig:
        architecture = content.get("hydra_head_arch", "mlp")
        _check_variant(content, architecture)
        prefix = architecture == "prefix-mlp"
        lm_head = f"hydra_lm_head.0.{'1.' if prefix else ''}weight"
        vocab_size, width = matrix_shape(shapes, lm_head)
        return HeadConfig(
            **(_prefix_fields(content, set(shapes), model) if prefix else {}),
            kind="hydra",
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size,
            target_hidden_size=width,
            hidden_size=width,
            own_lm_head=True,
            num_layers=int(prefix),
            num_heads_ahead=number(content, "hydra_num_heads", 4),
            num_residual=number(content, "hydra_num_layers", 1),
            target_name=str(content.get("base_model_name_or_path") or ""),
        )

    def write_config(self, config: HeadConfig, export: Export) -> Json:
        layer = write_decoder(config) if config.num_layers else {}
        return {
            **layer,
            "hydra_num_heads": config.num_heads_ahead,
            "hydra_num_layers": config.num_residual,
            "hydra_head_arch": "prefix-mlp" if config.num_layers else "mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "base_model_name_or_path": config.target_name or None,
            "torch_dtype": export.dtype,
        }

    def objections(self, config: HeadConfig) -> list[str]:
        found = flag_objections(
            config,
            qkv_bias="its attention has biases",
            o_bias="its attention has a bias behind it",
            qk_norm="it norms queries and keys",
        )
        return found if config.feature == "normed" else [*found, "it reads the target's state before the final norm"]


def _check_variant(content: Json, architecture: object) -> None:
    wrong = []
    if architecture not in ("mlp", "prefix-mlp"):
        wrong.append(f"hydra_head_arch {architecture}")
    if not content.get("grounded_heads", True):
        wrong.append("heads that do not look at the tokens before theirs (grounded_heads false)")
    if content.get("hidden_state_offset"):
        wrong.append(f"hidden_state_offset {content['hidden_state_offset']}")
    if wrong:
        allowed = "grounded heads of the kinds mlp and prefix-mlp on the last hidden state"
        raise CapabilityError("Hydra heads of this kind are not supported", got="; ".join(wrong), allowed=allowed)


def _prefix_fields(content: Json, names: set[str], model: ModelConfig | None) -> dict[str, Any]:
    """The prefix layer is one like the target's. The original leaves it to the target's configuration to say how."""
    if "num_attention_heads" in content:
        fields = read_decoder(content, names)
        return {key: fields[key] for key in fields if key not in ("vocab_size", "hidden_size", "num_layers")}
    if model is None:
        raise CapabilityError(
            "How many heads the prefix layer has is left to the target's configuration",
            got="a Hydra++ head without it",
            next_step="Name the target as well: --model, or load_head(..., model=...).",
        )
    return {**decoder_fields(model), "qkv_bias": model.qkv_bias, "o_bias": model.o_bias, "qk_norm": model.qk_norm}
