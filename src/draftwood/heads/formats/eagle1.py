"""EAGLE-1 and EAGLE-2 heads in their authors' layout: ``fc`` and ``layers.*``; the rest belongs to the target."""

from draftwood.heads.config import HeadConfig
from draftwood.heads.formats.eagle3_family import EMBED, LM_HEAD, looks_like_eagle3
from draftwood.heads.formats.fields import (
    feature_objections,
    flag_objections,
    read_decoder,
    rope_objections,
    write_decoder,
)
from draftwood.heads.formats.layout import Export, Json, Layout, Shapes
from draftwood.models import ModelConfig


class Eagle1Layout(Layout):
    name = "eagle"
    kinds = ("eagle",)

    def recognises(self, content: Json, names: set[str]) -> bool:
        has_layers = any(name.startswith("layers.0.") for name in names)
        return "fc.weight" in names and has_layers and not looks_like_eagle3(names)

    def read_config(self, content: Json, shapes: Shapes, model: ModelConfig | None) -> HeadConfig:
        names = set(shapes)
        fields = read_decoder(content, names)
        fields |= {"draft_vocab_size": fields["vocab_size"], "target_hidden_size": fields["hidden_size"]}
        bias = content.get("bias")
        return HeadConfig(**fields, kind="eagle", fc_bias="fc.bias" in names if bias is None else bool(bias))

    def write_config(self, config: HeadConfig, export: Export) -> Json:
        return {
            "architectures": ["LlamaForCausalLM"],
            **write_decoder(config),
            "bias": config.fc_bias,
            "qkv_bias": config.qkv_bias,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": export.dtype,
        }

    def ignored_shapes(self, config: HeadConfig) -> Shapes:
        return dict.fromkeys((EMBED, LM_HEAD), (config.vocab_size, config.hidden_size))

    def objections(self, config: HeadConfig) -> list[str]:
        found = flag_objections(config, "o_bias", "qk_norm") + feature_objections(config)
        if config.num_heads * config.head_dim != config.hidden_size:
            found.append("its attention is not as wide as its hidden state")
        return found + rope_objections(config)
