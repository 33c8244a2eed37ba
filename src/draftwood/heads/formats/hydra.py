"""Hydra heads in their authors' layout: ``hydra_mlp.*`` and ``hydra_lm_head.*`` in ``hydra_lm_head.pt``.

With the prefix layer of Hydra++ there is a dropout before each part, which takes an index of its own.
"""

from typing import Any

from draftwood.errors import CapabilityError
from draftwood.heads.config import HeadConfig, decoder_fields
from draftwood.heads.formats.fields import feature_objections, flag_objections, read_count, read_decoder, write_decoder
from draftwood.heads.formats.layout import Export, Json, Layout, Shapes, matrix_shape
from draftwood.models import ModelConfig

PREFIX = "prefix_embeding_layer."  # misspelled in the checkpoints


class HydraLayout(Layout):
    name = "hydra"
    kinds = ("hydra",)
    weights = "hydra_lm_head.pt"

    def recognises(self, content: Json, names: set[str]) -> bool:
        return "hydra_num_heads" in content

    def stored_names(self, own: str, config: HeadConfig) -> tuple[str, ...]:
        if own.startswith("prefix."):
            return (PREFIX + own.removeprefix("prefix."),)
        _, branch, part, rest = own.split(".", 3)
        if part == "lm_head":
            return (f"hydra_lm_head.{branch}.{'1.' if config.num_layers else ''}{rest}",)
        blocks = [0] if part == "join" else range(1, config.num_residual)
        places = [2 * block + 1 if config.num_layers else block for block in blocks]
        return tuple(f"hydra_mlp.{branch}.{place}.{rest}" for place in places)

    def ignored_shapes(self, config: HeadConfig) -> Shapes:
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
            num_heads_ahead=read_count(content, "hydra_num_heads", 4),
            num_residual=read_count(content, "hydra_num_layers", 1),
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
        return flag_objections(config, "qkv_bias", "o_bias", "qk_norm") + feature_objections(config)


def _check_variant(content: Json, architecture: object) -> None:
    wrong = []
    if architecture not in ("mlp", "prefix-mlp"):
        wrong.append(f"hydra_head_arch {architecture}")
    if not content.get("grounded_heads", True):
        wrong.append("heads that do not read the tokens before theirs (grounded_heads false)")
    if content.get("hidden_state_offset"):
        wrong.append(f"hidden_state_offset {content['hidden_state_offset']}")
    if wrong:
        allowed = "grounded heads of the kinds mlp and prefix-mlp on the last hidden state"
        raise CapabilityError("Hydra heads of this kind are not supported", got="; ".join(wrong), allowed=allowed)


def _prefix_fields(content: Json, names: set[str], model: ModelConfig | None) -> dict[str, Any]:
    """The shape of the prefix layer. It is the target's, and the original layout does not store it."""
    if "num_attention_heads" in content:
        fields = read_decoder(content, names)
        return {key: fields[key] for key in fields if key not in ("vocab_size", "hidden_size", "num_layers")}
    if model is None:
        raise CapabilityError(
            "The shape of the prefix layer is that of the target, which is not known",
            got="a Hydra++ head without a target",
            next_step="Name the target: --model, or load_head(..., model=...).",
        )
    return {**decoder_fields(model), "qkv_bias": model.qkv_bias, "o_bias": model.o_bias, "qk_norm": model.qk_norm}
