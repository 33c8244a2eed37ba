"""The base of the four EAGLE-3 layouts: the original's, SGLang's, vLLM's and that of speculators."""

from typing import Any

from draftwood.errors import CapabilityError
from draftwood.heads.config import NUM_DEFAULT_TAPS, HeadConfig
from draftwood.heads.formats.fields import eagle_config, read_count, read_decoder, read_taps, write_decoder
from draftwood.heads.formats.layout import Export, Json, Layout, Shapes

EMBED = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
MAP_NAMES = ("d2t", "t2d")


def looks_like_eagle3(names: set[str]) -> bool:
    """Only EAGLE-3 heads have a middle layer, or a norm for features as well as for tokens."""
    return any("midlayer." in name or name.endswith("hidden_norm.weight") for name in names)


def _norms_before_fc(content: Json) -> bool:
    return bool(eagle_config(content).get("norm_before_fc", content.get("norm_before_fc")))


def _check_variant(content: Json) -> None:
    """Raise for variants that would have to be computed differently."""
    found = []
    if not eagle_config(content).get("use_aux_hidden_state", True):
        found.append("it reads the target's last hidden state (use_aux_hidden_state false)")
    if content.get("logit_scale", 1.0) != 1.0:
        found.append(f"its logits are scaled (logit_scale {content['logit_scale']})")
    if found:
        raise CapabilityError("This variant of EAGLE-3 is not supported", got="; ".join(found))


class Eagle3Layout(Layout):
    kinds = ("eagle3",)
    first_layer = "midlayer."  # prefix of layer 0
    norms_residual = False  # default of norm_before_residual

    def normalize_name(self, name: str) -> str:
        return self.first_layer + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name

    def stored_names(self, own: str, config: HeadConfig) -> tuple[str, ...]:
        return (self.normalize_name(own),)

    def ignored_shapes(self, config: HeadConfig) -> Shapes:
        """A copy of the target's embeddings, and vocabulary maps of a head with the full vocabulary."""
        shapes: dict[str, tuple[int, ...]] = {}
        if not config.own_embed:
            shapes[EMBED] = (config.vocab_size, config.hidden_size)
        if not config.has_draft_vocabulary:
            shapes |= dict.fromkeys(MAP_NAMES, (config.vocab_size,))
        return shapes

    def read_fields(self, content: Json, outer: Json, names: set[str]) -> dict[str, Any]:
        """The fields that all four share: those of the layers from ``content``, the others from ``outer``."""
        _check_variant(outer)
        fields = read_decoder(content, names)
        taps = read_taps(outer)
        draft_vocab = read_count(outer, "draft_vocab_size", fields["vocab_size"])
        shrinks = draft_vocab != fields["vocab_size"]
        return {
            **fields,
            "kind": "eagle3",
            "draft_vocab_size": draft_vocab,
            "target_hidden_size": read_count(outer, "target_hidden_size", fields["hidden_size"]),
            "taps": taps,
            "num_taps": read_count(outer, "num_aux_hidden_states", len(taps) or NUM_DEFAULT_TAPS),
            "fc_bias": "fc.bias" in names,
            "norm_before_fc": _norms_before_fc(outer) or "input_norm.weight" in names,
            "fc_norm": bool(outer.get("fc_norm") or outer.get("use_aux_norm")) or "fc_norm.0.weight" in names,
            "norm_before_residual": bool(outer.get("norm_before_residual", self.norms_residual)),
            "norm_output": bool(outer.get("norm_output")),
            "own_lm_head": shrinks or LM_HEAD in names,
        }

    def write_plain_config(self, config: HeadConfig, export: Export, architecture: str) -> Json:
        """The config.json of a head in the form of a small model."""
        content: Json = {
            "architectures": [architecture],
            **write_decoder(config),
            "draft_vocab_size": config.draft_vocab_size,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": export.dtype,
        }
        if config.own_embed:
            content["target_hidden_size"] = config.target_hidden_size
        return content
