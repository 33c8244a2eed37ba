"""EAGLE-3 in its authors' layout: ``midlayer.*``, a draft vocabulary by offsets, and no field for taps."""

from draftwood.heads.config import NUM_DEFAULT_TAPS, HeadConfig
from draftwood.heads.formats.eagle3_family import EMBED, Eagle3Layout, looks_like_eagle3
from draftwood.heads.formats.fields import flag_objections, published_tap_objections, rope_objections
from draftwood.heads.formats.layout import Export, Json, Shapes
from draftwood.models import ModelConfig, read_count


class EagleLayout(Eagle3Layout):
    name = "eagle"

    def recognises(self, content: Json, names: set[str]) -> bool:
        return looks_like_eagle3(names)

    def read_config(self, content: Json, shapes: Shapes, model: ModelConfig | None) -> HeadConfig:
        names = set(shapes)
        read_count(content, "draft_vocab_size")  # required by the original implementation
        fields = self.read_fields(content, content, names)
        wider = fields["hidden_size"] != fields["target_hidden_size"]
        own_embed = wider or (content.get("target_hidden_size") is not None and EMBED in names)
        return HeadConfig(**{**fields, "own_embed": own_embed, "own_lm_head": True})

    def write_config(self, config: HeadConfig, export: Export) -> Json:
        return self.write_plain_config(config, export, "LlamaForCausalLM")

    def objections(self, config: HeadConfig) -> list[str]:
        attention = ("qkv_bias", "o_bias", "qk_norm", "fc_bias")
        norms = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
        found = flag_objections(config, *attention, *norms)
        if config.num_layers > 1:
            found.append(f"it has {config.num_layers} layers")
        if not config.own_lm_head:
            found.append("it has no lm_head of its own")
        if config.num_taps != NUM_DEFAULT_TAPS:
            found.append(f"it reads {config.num_taps} hidden states")
        return found + rope_objections(config) + published_tap_objections(config)
