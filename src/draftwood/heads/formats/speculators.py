"""EAGLE-3 in the layout of the speculators library, which names the head's target."""

from draftwood.errors import CapabilityError, ModelError
from draftwood.heads.config import HeadConfig
from draftwood.heads.formats.eagle3_family import Eagle3Layout
from draftwood.heads.formats.fields import (
    TAP_IDS,
    bias_objections,
    flag_objections,
    tap_order_objections,
    write_decoder,
)
from draftwood.heads.formats.layout import Export, Json, Shapes
from draftwood.models import ModelConfig

VERSION = "0.3.0"
SPECULATIVE_TOKENS = 5  # the default that engines read from the file
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class SpeculatorsLayout(Eagle3Layout):
    name = "speculators"
    first_layer = "layers.0."
    norms_residual = True

    def recognises(self, content: Json, names: set[str]) -> bool:
        return "speculators_model_type" in content

    def read_config(self, content: Json, shapes: Shapes, model: ModelConfig | None) -> HeadConfig:
        kind, layers = content["speculators_model_type"], content.get("transformer_layer_config")
        if kind != "eagle3":
            raise CapabilityError("Speculators of this type are not supported", got=kind, allowed=["eagle3"])
        if not isinstance(layers, dict):
            raise ModelError("config.json lacks 'transformer_layer_config'", next_step="Download the head again.")
        fields = self.read_fields(layers, content, set(shapes))
        wider = fields["hidden_size"] != fields["target_hidden_size"]
        own = {
            "own_lm_head": True,
            "own_embed": wider or bool(content.get("embed_requires_grad")),
            "target_name": _read_verifier(content),
        }
        return HeadConfig(**{**fields, **own})

    def write_config(self, config: HeadConfig, export: Export) -> Json:
        wider = config.hidden_size != config.target_hidden_size
        proposal = {"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS}
        architectures = [export.architecture] if export.architecture else []
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": VERSION,
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size if wider else None,
            **{name: getattr(config, name) for name in _FLAGS},
            "embed_requires_grad": config.own_embed,
            TAP_IDS: list(config.taps) or None,
            "tie_word_embeddings": False,
            "torch_dtype": export.dtype,
            "transformer_layer_config": write_decoder(config),
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{**proposal, "accept_tolerance": 0.0, "verifier_accept_k": 1}],
                "verifier": {"name_or_path": config.target_name, "architectures": architectures},
            },
        }

    def objections(self, config: HeadConfig) -> list[str]:
        found = flag_objections(config, "fc_bias") + bias_objections(config)
        if not config.own_lm_head:
            found.append("it has no lm_head of its own")
        if not config.target_name:
            found.append("the name of its target is not known; pass it with --model")
        return found + tap_order_objections(config)


def _read_verifier(content: Json) -> str:
    """The target's name; empty if the file has none."""
    for key in ("speculators_config", "verifier"):
        content = content.get(key) or {}
        if not isinstance(content, dict):
            return ""
    return str(content.get("name_or_path") or "")
