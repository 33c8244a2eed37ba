"""EAGLE-3 for SGLang: the original's names; taps in ``eagle_config``, where id i is the output of layer i.

The input norm of layers after the first is called ``hidden_norm``.
"""

import re

from draftwood.heads.config import HeadConfig
from draftwood.heads.formats.eagle3_family import Eagle3Layout, looks_like_eagle3
from draftwood.heads.formats.fields import SGLANG_SHIFT, TAP_IDS, flag_objections, tap_order_objections
from draftwood.heads.formats.layout import Export, Json, Shapes
from draftwood.models import ModelConfig

ARCHITECTURE = "LlamaForCausalLMEagle3"
_OLD_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_FURTHER_NORM = re.compile(r"(layers\.[1-9]\d*\.)input_layernorm\.")


class SglangLayout(Eagle3Layout):
    name = "sglang"
    derived = frozenset({"t2d"})

    def recognises(self, content: Json, names: set[str]) -> bool:
        return looks_like_eagle3(names) and content.get("architectures") == [ARCHITECTURE]

    def normalize_name(self, name: str) -> str:
        name = super().normalize_name(name.removeprefix("model."))
        module, _, rest = name.partition(".")
        return f"{_OLD_NORMS[module]}.{rest}" if module in _OLD_NORMS else name

    def stored_names(self, own: str, config: HeadConfig) -> tuple[str, ...]:
        return (self.normalize_name(_FURTHER_NORM.sub(r"\1hidden_norm.", own)),)

    def read_config(self, content: Json, shapes: Shapes, model: ModelConfig | None) -> HeadConfig:
        fields = self.read_fields(content, content, set(shapes))
        return HeadConfig(**fields, own_embed=fields["hidden_size"] != fields["target_hidden_size"])

    def write_config(self, config: HeadConfig, export: Export) -> Json:
        content = self.write_plain_config(config, export, ARCHITECTURE)
        if not config.own_lm_head:
            content["draft_vocab_size"] = None
        content |= {name: getattr(config, name) for name in ("fc_norm", "norm_before_fc", "norm_output")}
        content |= {"bias": config.fc_bias, "num_aux_hidden_states": config.num_taps}
        ids = {TAP_IDS: [tap - SGLANG_SHIFT for tap in config.taps]} if config.taps else {}
        return {**content, "eagle_config": {"use_aux_hidden_state": True, **ids}}

    def objections(self, config: HeadConfig) -> list[str]:
        found = flag_objections(config, "qkv_bias", "o_bias", "qk_norm", "norm_before_residual")
        if config.own_embed and config.hidden_size == config.target_hidden_size:
            found.append("it has its own embeddings, which SGLang would replace by the target's")
        if 0 in config.taps:
            found.append("it reads the target's embeddings, which are not the output of a layer")
        return found + tap_order_objections(config)
