"""What a draft head looks like: sizes, the hidden states it reads, and the variants of its architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from draftwood.config import one_of
from draftwood.errors import OptionError
from draftwood.models import ModelConfig, Rope

KINDS = ("eagle", "eagle3", "medusa", "hydra")
FEATURES = ("normed", "raw")
NUM_DEFAULT_TAPS = 3

Rule = tuple[str, str, bool]


class TargetShape(Protocol):
    """What a head must know of its target; ``TargetInfo`` and ``ModelConfig`` both say it."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """Everything a head module is built from. Counts are ``num_*``; sizes are in elements.

    Fields of the decoder layers are 0 where a head has none. Taps are numbered as ``Target.set_taps`` numbers them: k
    is the input of layer k, the number of layers is the last output before the final norm.
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

    # what comes in
    taps: tuple[int, ...] = ()  # empty: the usual ones, see taps_for
    num_taps: int = 1
    feature: str = (
        "normed"  # whether the last hidden state is read behind the target's final norm, or "raw"; not eagle3
    )
    own_embed: bool = False  # else the target's embeddings
    fc_bias: bool = False
    norm_before_fc: bool = False  # one norm over all taps
    fc_norm: bool = False  # a norm for each tap
    norm_before_residual: bool = False  # the residual of layer 0 is the normed feature

    # what goes out
    own_lm_head: bool = False  # else the target's
    norm_output: bool = False  # the feature that is fed back is the normed output

    # Medusa and Hydra
    num_heads_ahead: int = 0
    num_residual: int = 0  # residual blocks of each

    # the target it was made for, where that is known
    target_name: str = ""
    target_num_layers: int = 0
    target_fingerprint: str = ""  # of its weights: heads/target.py

    def __post_init__(self) -> None:
        one_of("kind", self.kind, KINDS)
        one_of("feature", self.feature, FEATURES)
        rules = [*self._size_rules(), *(self._eagle3_rules() if self.kind == "eagle3" else self._other_rules())]
        wrong = [f"{name} is {getattr(self, name)} and must be {wanted}" for name, wanted, fits in rules if not fits]
        if wrong:
            raise OptionError("There can be no such head", got="; ".join(wrong))

    def _size_rules(self) -> Iterator[Rule]:
        """A field, what it has to be, whether it is."""
        names = ["vocab_size", "draft_vocab_size", "target_hidden_size", "hidden_size", "num_taps"]
        if self.num_layers:
            names += ["intermediate_size", "num_heads", "num_kv_heads", "head_dim", "context_length"]
            shared = self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads == 0
            yield "num_kv_heads", f"a divisor of num_heads, {self.num_heads}", shared
            yield "head_dim", "an even number", self.head_dim % 2 == 0
        for name in names:
            yield name, "1 or more", getattr(self, name) >= 1
        fits = len(self.taps) in (0, self.num_taps) and all(tap >= 0 for tap in self.taps)
        yield "taps", f"{self.num_taps} of them, or none for the usual ones", fits

    def _eagle3_rules(self) -> Iterator[Rule]:
        same_width = self.hidden_size == self.target_hidden_size
        yield "num_layers", "1 or more", self.num_layers >= 1
        yield "draft_vocab_size", f"at most that of the target, {self.vocab_size}", self._fewer_tokens >= 0
        yield "own_embed", "true for a head of another width than its target's", self.own_embed or same_width
        shared = same_width and self._fewer_tokens == 0
        yield "own_lm_head", "true where the target's has other sizes", self.own_lm_head or shared

    def _other_rules(self) -> Iterator[Rule]:
        same_width = self.hidden_size == self.target_hidden_size
        yield "num_taps", "1 for its kind", self.num_taps == 1
        yield "hidden_size", f"that of the target, {self.target_hidden_size}", same_width
        yield "draft_vocab_size", f"that of the target, {self.vocab_size}", self._fewer_tokens == 0
        yield "own_embed", "false for its kind", not self.own_embed
        if self.kind == "eagle":
            yield "num_layers", "1 or more", self.num_layers >= 1
            yield "own_lm_head", "false for its kind", not self.own_lm_head
            return
        most = 0 if self.kind == "medusa" else 1  # the prefix layer of Hydra++
        yield "num_layers", f"at most {most} for its kind", 0 <= self.num_layers <= most
        yield "num_heads_ahead", "1 or more", self.num_heads_ahead >= 1
        yield "num_residual", "1 or more", self.num_residual >= 1
        yield "own_lm_head", "true for its kind", self.own_lm_head or self.kind == "medusa"

    @property
    def _fewer_tokens(self) -> int:
        return self.vocab_size - self.draft_vocab_size

    def taps_for(self, num_layers: int) -> tuple[int, ...]:
        """What ``Target.set_taps`` takes, for a target with this many layers."""
        if self.taps:
            return self.taps
        return default_taps(num_layers) if self.kind == "eagle3" else (num_layers,)

    @property
    def has_draft_vocabulary(self) -> bool:
        """Whether its tokens have ids of their own."""
        return self.draft_vocab_size != self.vocab_size


def published_taps(num_layers: int) -> tuple[int, ...]:
    """The taps every engine takes where a checkpoint names none: a low, a middle and a high layer's input."""
    return (2, num_layers // 2, num_layers - 3)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The published taps; for targets of so few layers that those would coincide, the same idea over what there is."""
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
    """A head for this target, with the target's own sizes: the usual one of its kind, but for ``changes``.

    ``prefix`` gives Hydra heads the attention layer in front of them (Hydra++).
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
    """The shape of a decoder layer like the target's own, without its biases and norms of queries and keys."""
    names = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "norm_eps", "rope", "context_length")
    return {name: getattr(model, name) for name in names}


def check_fit(config: HeadConfig, target: TargetShape) -> list[str]:
    """What of the head does not fit this target; empty where it does."""
    found = []
    if config.target_hidden_size != target.hidden_size:
        found.append(f"hidden size: the head wants {config.target_hidden_size}, the target has {target.hidden_size}")
    if config.vocab_size != target.vocab_size:
        found.append(f"vocabulary: the head wants {config.vocab_size} tokens, the target has {target.vocab_size}")
    beyond = [tap for tap in config.taps if tap > target.num_layers]
    if beyond:
        found.append(f"taps: the head reads {beyond}, the target has {target.num_layers} layers")
    if config.kind != "eagle3" and config.taps and config.taps[0] != target.num_layers and not beyond:
        found.append(f"taps: the head reads {list(config.taps)}, the target's last state is {target.num_layers}")
    if config.target_num_layers and config.target_num_layers != target.num_layers:
        made_for = f"the head was made for {config.target_num_layers}"
        found.append(f"layers: {made_for}, the target has {target.num_layers}")
    return found
