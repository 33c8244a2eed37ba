"""Medusa heads in their authors' layout: ``{branch}.{place}.*`` in ``medusa_lm_head.pt``.

The blocks of a branch are one module, saved once for each place where it is applied.
"""

from draftwood.heads.config import HeadConfig
from draftwood.heads.formats.fields import feature_objections, read_count
from draftwood.heads.formats.layout import Export, Json, Layout, Shapes, matrix_shape
from draftwood.models import ModelConfig


class MedusaLayout(Layout):
    name = "medusa"
    kinds = ("medusa",)
    weights = "medusa_lm_head.pt"

    def recognises(self, content: Json, names: set[str]) -> bool:
        return "medusa_num_heads" in content

    def normalize_name(self, name: str) -> str:
        return name.removeprefix("medusa_head.")

    def stored_names(self, own: str, config: HeadConfig) -> tuple[str, ...]:
        _, branch, part, rest = own.split(".", 3)
        if part == "lm_head":
            return (f"{branch}.{config.num_residual}.{rest}",)
        return tuple(f"{branch}.{place}.{rest}" for place in range(config.num_residual))

    def read_config(self, content: Json, shapes: Shapes, model: ModelConfig | None) -> HeadConfig:
        num_residual = read_count(content, "medusa_num_layers", 1)
        width, _ = matrix_shape(shapes, "0.0.linear.weight")
        lm_head = f"0.{num_residual}.weight"
        stated = read_count(content, "vocab_size", model.vocab_size if model is not None else 0)
        own_lm_head = lm_head in shapes or not stated  # older heads use the target's
        vocab_size = matrix_shape(shapes, lm_head)[0] if own_lm_head else stated
        return HeadConfig(
            kind="medusa",
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size,
            target_hidden_size=width,
            hidden_size=width,
            own_lm_head=own_lm_head,
            num_heads_ahead=read_count(content, "medusa_num_heads", 4),
            num_residual=num_residual,
            target_name=str(content.get("base_model_name_or_path") or ""),
        )

    def write_config(self, config: HeadConfig, export: Export) -> Json:
        return {
            "medusa_num_heads": config.num_heads_ahead,
            "medusa_num_layers": config.num_residual,
            "base_model_name_or_path": config.target_name or None,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "torch_dtype": export.dtype,
        }

    def objections(self, config: HeadConfig) -> list[str]:
        return feature_objections(config)
