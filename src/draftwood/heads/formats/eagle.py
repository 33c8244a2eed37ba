"""EAGLE-3 as its authors lay it down: ``midlayer.*``, a draft vocabulary by offsets, and no word about taps."""

from __future__ import annotations

from draftwood.heads.config import USUAL_TAPS, HeadConfig
from draftwood.heads.formats.eagle3_family import EMBED, Eagle3Layout, looks_like_eagle3
from draftwood.heads.formats.fields import flag_objections, only_published_taps, rope_objections
from draftwood.heads.formats.layout import Export, Json, Shapes
from draftwood.models import ModelConfig, read_count


class EagleLayout(Eagle3Layout):
    name = "eagle"

    def recognises(self, content: Json, names: set[str]) -> bool:
        return looks_like_eagle3(names)

    def read_config(self, content: Json, shapes: Shapes, model: ModelConfig | None) -> HeadConfig:
        names = set(shapes)
        read_count(content, "draft_vocab_size")  # the original cannot be built without
        fields = self.read_fields(content, content, names)
        wider = fields["hidden_size"] != fields["target_hidden_size"]
        own_embed = wider or (content.get("target_hidden_size") is not None and EMBED in names)
        return HeadConfig(**{**fields, "own_embed": own_embed, "own_lm_head": True})

    def write_config(self, config: HeadConfig, export: Export) -> Json:
        return self.plain_json(config, export, "LlamaForCausalLM")

    def objections(self, config: HeadConfig) -> list[str]:
        found = flag_objections(
            config,
            qkv_bias="its attention has biases",
            o_bias="its attention has a bias behind it",
            qk_norm="it norms queries and keys",
            fc_bias="its fc has a bias",
            norm_before_fc="it norms its taps (norm_before_fc)",
            fc_norm="it norms each of its taps (fc_norm)",
            norm_before_residual="its residual is normed (norm_before_residual)",
            norm_output="its output is normed before it is fed back (norm_output)",
        )
        if config.num_layers > 1:
            found.append(f"it has {config.num_layers} layers")
        if not config.own_lm_head:
            found.append("it has no lm_head of its own")
        if config.num_taps != USUAL_TAPS:
            found.append(f"it reads {config.num_taps} hidden states")
        return found + rope_objections(config) + only_published_taps(config)
