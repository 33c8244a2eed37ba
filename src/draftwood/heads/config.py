"""The configuration of a draft head: sizes, the hidden states it reads, and variants of its architecture."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from draftwood.config import one_of
from draftwood.errors import OptionError
from draftwood.models import ModelConfig, Rope

KINDS = ("eagle", "eagle3", "medusa", "hydra")
FEATURES = ("normed", "raw")
NUM_DEFAULT_TAPS = 3

Rule = tuple[str, str, bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """Everything a head module is built from. Counts are ``num_*``; sizes are in elements.

    Fields of the decoder layers are 0 if a head has none. Taps are numbered as in ``Target.set_taps``: k is the input
    of layer k, ``num_layers`` is the last output before the final norm.
    """

    kind: str  # one of KINDS
    vocab_size: int  # of the target
    draft_vocab_size: int  # tokens the head can suggest
    target_hidden_size: int
    hidden_size: int

    # decoder layers: EAGLE, EAGLE-3, and the prefix layer of Hydra++
    num_layers: int = 0
    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    context_length: int = 2048
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # queries and keys are normed as in Qwen3

    # input
    taps: tuple[int, ...] = ()  # empty: the default taps, see taps_for
    num_taps: int = 1
    feature: str = "normed"  # last hidden state after the target's final norm, or "raw": before it; not for eagle3
    own_embed: bool = False  # otherwise the target's embeddings
    fc_bias: bool = False
    norm_before_fc: bool = False  # one norm over all taps
    fc_norm: bool = False  # one norm per tap
    norm_before_residual: bool = False  # the residual of layer 0 is the normed feature

    # output
    own_lm_head: bool = False  # otherwise the target's
    norm_output: bool = False  # the feature that is fed back is the normed output

    # Medusa and Hydra
    num_heads_ahead: int = 0
    num_residual: int = 0  # residual blocks per head

    # the target it was made for, if known
    target_name: str = ""
    target_num_layers: int = 0
    target_fingerprint: str = ""  # see heads/target.py

    def __post_init__(self) -> None:
        one_of("kind", self.kind, KINDS)
        one_of("feature", self.feature, FEATURES)
        rules = [*self._size_rules(), *(self._eagle3_rules() if self.kind == "eagle3" else self._other_rules())]
        wrong = [f"{name} is {getattr(self, name)} and must be {wanted}" for name, wanted, fits in rules if not fits]
        if wrong:
            raise OptionError("The head configuration is invalid", got="; ".join(wrong))

    def _size_rules(self) -> Iterator[Rule]:
        """Each rule: a field, what it must be, whether it is."""
        names = ["vocab_size", "draft_vocab_size", "target_hidden_size", "hidden_size", "num_taps"]
        if self.num_layers:
            names += ["intermediate_size", "num_heads", "num_kv_heads", "head_dim", "context_length"]
            shared = self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads == 0
            yield "num_kv_heads", f"a divisor of num_heads, {self.num_heads}", shared
            yield "head_dim", "an even number", self.head_dim % 2 == 0
        for name in names:
            yield name, "1 or more", getattr(self, name) >= 1
        fits = len(self.taps) in (0, self.num_taps) and all(tap >= 0 for tap in self.taps)
        yield "taps", f"{self.num_taps} layers, or empty for the default taps", fits

    def _eagle3_rules(self) -> Iterator[Rule]:
        same_width = self.hidden_size == self.target_hidden_size
        yield "num_layers", "1 or more", self.num_layers >= 1
        fits = self.draft_vocab_size <= self.vocab_size
        yield "draft_vocab_size", f"at most that of the target, {self.vocab_size}", fits
        yield "own_embed", "true if hidden_size differs from the target's", self.own_embed or same_width
        shared = same_width and not self.has_draft_vocabulary
        yield "own_lm_head", "true if the target's has other sizes", self.own_lm_head or shared

    def _other_rules(self) -> Iterator[Rule]:
        same_width = self.hidden_size == self.target_hidden_size
        yield "num_taps", "1 for its kind", self.num_taps == 1
        yield "hidden_size", f"that of the target, {self.target_hidden_size}", same_width
        yield "draft_vocab_size", f"that of the target, {self.vocab_size}", not self.has_draft_vocabulary
        yield "own_embed", "false for its kind", not self.own_embed
        if self.kind == "eagle":
            yield "num_layers", "1 or more", self.num_layers >= 1
            yield "own_lm_head", "false for its kind", not self.own_lm_head
            return
        max_layers = 0 if self.kind == "medusa" else 1  # the prefix layer of Hydra++
        yield "num_layers", f"at most {max_layers} for its kind", 0 <= self.num_layers <= max_layers
        yield "num_heads_ahead", "1 or more", self.num_heads_ahead >= 1
        yield "num_residual", "1 or more", self.num_residual >= 1
        yield "own_lm_head", "true for its kind", self.own_lm_head or self.kind == "medusa"

    def taps_for(self, num_layers: int) -> tuple[int, ...]:
        """The argument of ``Target.set_taps`` for a target with ``num_layers`` layers."""
        if self.taps:
            return self.taps
        return default_taps(num_layers) if self.kind == "eagle3" else (num_layers,)

    @property
    def has_draft_vocabulary(self) -> bool:
        """Whether the head has its own, smaller vocabulary."""
        return self.draft_vocab_size != self.vocab_size


def published_taps(num_layers: int) -> tuple[int, ...]:
    """The taps that every engine uses if a checkpoint names none: the inputs of a low, a middle and a high layer."""
    return (2, num_layers // 2, num_layers - 3)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The published taps. In targets with so few layers that those would coincide, taps are spread over all layers."""
    taps = published_taps(num_layers)
    if taps[0] < taps[1] < taps[2]:
        return taps
    lowest = 1 if num_layers >= NUM_DEFAULT_TAPS else 0
    return tuple(lowest + (num_layers - lowest) * step // 2 for step in range(NUM_DEFAULT_TAPS))


def default_head_config(
    kind: str,
    model: ModelConfig,
    *,
    draft_vocab_size: int | None = None,
    num_heads_ahead: int = 4,
    num_residual: int = 1,
    prefix: bool = False,
    target_name: str = "",
    **changes: Any,
) -> HeadConfig:
    """The default head of this kind for a target, with the target's sizes and ``changes`` applied.

    ``prefix`` adds the attention layer of Hydra++ to Hydra heads.
    """
    one_of("kind", kind, KINDS)
    ahead = kind in ("medusa", "hydra")
    num_layers = int(prefix) if ahead else 1
    fields: dict[str, Any] = {
        "kind": kind,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": draft_vocab_size or model.vocab_size,
        "target_hidden_size": model.hidden_size,
        "hidden_size": model.hidden_size,
        "num_layers": num_layers,
        "taps": default_taps(model.num_layers) if kind == "eagle3" else (model.num_layers,),
        "num_taps": NUM_DEFAULT_TAPS if kind == "eagle3" else 1,
        "own_lm_head": kind != "eagle",
        "fc_bias": kind == "eagle",
        "target_name": target_name,
        "target_num_layers": model.num_layers,
    }
    if num_layers:
        fields |= decoder_fields(model)
    if ahead:
        fields |= {"num_heads_ahead": num_heads_ahead, "num_residual": num_residual}
    return HeadConfig(**{**fields, **changes})


def decoder_fields(model: ModelConfig) -> dict[str, Any]:
    """The shape of a decoder layer like the target's, without its biases and its norms of queries and keys."""
    names = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "norm_eps", "rope", "context_length")
    return {name: getattr(model, name) for name in names}
