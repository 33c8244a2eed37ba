"""EAGLE-3 for vLLM: the original's names; taps at the top of config.json, where id k is the input of layer k."""

from draftwood.heads.config import HeadConfig
from draftwood.heads.formats.eagle3_family import EMBED, Eagle3Layout, looks_like_eagle3
from draftwood.heads.formats.fields import TAP_IDS, bias_objections, flag_objections, tap_order_objections
from draftwood.heads.formats.layout import Export, Json, Shapes
from draftwood.heads.formats.sglang import ARCHITECTURE as SGLANG
from draftwood.models import ModelConfig

ARCHITECTURE = "Eagle3LlamaForCausalLM"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class VllmLayout(Eagle3Layout):
    name = "vllm"
    derived = frozenset({"t2d"})

    def recognises(self, content: Json, names: set[str]) -> bool:
        architectures = content.get("architectures")
        is_vllm = architectures == [ARCHITECTURE] or (TAP_IDS in content and architectures != [SGLANG])
        return looks_like_eagle3(names) and is_vllm

    def read_config(self, content: Json, shapes: Shapes, model: ModelConfig | None) -> HeadConfig:
        return HeadConfig(**self.read_fields(content, content, set(shapes)), own_embed=EMBED in shapes)

    def write_config(self, config: HeadConfig, export: Export) -> Json:
        content = self.write_plain_config(config, export, ARCHITECTURE)
        content |= {name: getattr(config, name) for name in _FLAGS}
        content["num_aux_hidden_states"] = config.num_taps
        return {**content, TAP_IDS: list(config.taps)} if config.taps else content

    def objections(self, config: HeadConfig) -> list[str]:
        return flag_objections(config, "fc_bias", "qk_norm") + bias_objections(config) + tap_order_objections(config)
