"""EAGLE-3 heads: a feature from several layers of the target, and their own vocabulary and lm_head.

Layer 0 attends over normed embedding and normed feature side by side, twice the usual width. Further layers are
ordinary. The output before the last norm is the feature of child nodes.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from draftwood.heads.base import Head, fill_normal_
from draftwood.heads.config import HeadConfig
from draftwood.heads.layers import Angles, DecoderLayer, RMSNorm, Rotation, float_logits
from draftwood.heads.vocabulary import check_vocabulary, inverse_map, token_mask
from draftwood.targets import Attend


class FirstLayer(DecoderLayer):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, 0, input_size=2 * config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def join(self, token_embeds: Tensor, features: Tensor, angles: Angles, attend: Attend) -> Tensor:
        normed = self.hidden_norm(features)
        attended = torch.cat([self.input_layernorm(token_embeds), normed], dim=-1)  # [..., N, 2H]
        return self.run(attended, normed if self.norm_before_residual else features, angles, attend)


class Eagle3Head(Head):
    d2t: Tensor  # [Vd] int64, target id minus draft id
    t2d: Tensor  # [V] bool, whether the head has the token
    _to_draft: Tensor  # [V] int64 draft id; -1 if it has not

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        size, wide = config.hidden_size, config.num_taps * config.target_hidden_size
        self.fc = nn.Linear(wide, size, bias=config.fc_bias)
        self.input_norm = RMSNorm(wide, config.norm_eps) if config.norm_before_fc else nn.Identity()
        tap_norms = (RMSNorm(config.target_hidden_size, config.norm_eps) for _ in range(config.num_taps))
        self.fc_norm = nn.ModuleList(tap_norms if config.fc_norm else ())
        further = (DecoderLayer(config, index) for index in range(1, config.num_layers))
        self.layers = nn.ModuleList([FirstLayer(config), *further])
        self.norm = RMSNorm(size, config.norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False) if config.own_lm_head else None
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if config.own_embed else None
        self._rotation = Rotation(config)
        if config.has_draft_vocabulary:
            first = torch.arange(config.draft_vocab_size)  # until a vocabulary is set
            self.register_buffer("d2t", torch.zeros_like(first))
            self.register_buffer("t2d", token_mask(first, config.vocab_size))
            self.register_buffer("_to_draft", inverse_map(first, config.vocab_size), persistent=False)
            self.register_load_state_dict_post_hook(_update_maps)  # type: ignore[no-untyped-call]

    def set_vocabulary(self, token_ids: Tensor) -> None:
        """Set the target tokens that the head can suggest, ``token_ids [Vd]`` in the order of its own ids."""
        total = self.config.vocab_size
        token_ids = check_vocabulary(token_ids.to(self.d2t.device), self.config.draft_vocab_size, total)
        self.d2t = token_ids - torch.arange(len(token_ids), device=token_ids.device)
        self.t2d = token_mask(token_ids, total)
        self._to_draft = inverse_map(token_ids, total)

    def vocabulary(self) -> Tensor:
        """The target tokens that the head can suggest, ``[Vd]``."""
        return self.target_ids(torch.arange(self.config.draft_vocab_size, device=self.fc.weight.device))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids] if self.config.has_draft_vocabulary else draft_ids

    def draft_ids(self, target_ids: Tensor) -> Tensor:
        return self._to_draft[target_ids] if self.config.has_draft_vocabulary else target_ids

    def embed(self, token_ids: Tensor) -> Tensor:
        own = self.embed_tokens
        return super().embed(token_ids) if own is None else F.embedding(token_ids, own.weight)

    def fuse(self, taps: Tensor) -> Tensor:
        taps = self.input_norm(taps)
        if self.fc_norm:
            parts = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(taps)
        return fused

    def forward(self, token_embeds: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Predict the features ``[..., N, H]`` of tokens whose predecessors have ``features [..., N, H]``."""
        angles = self._rotation(positions, features.dtype)
        first, *further = self.layers
        assert isinstance(first, FirstLayer)
        hidden = first.join(token_embeds, features, angles, attend)
        for layer in further:
            hidden = layer(hidden, angles, attend)
        normed: Tensor = self.norm(hidden) if self.config.norm_output else hidden
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., Vd]`` float32."""
        normed = hidden if self.config.norm_output else self.norm(hidden)
        return self.target_logits(normed) if self.lm_head is None else float_logits(normed, self.lm_head.weight)

    def _reset_special(self, generator: torch.Generator) -> None:
        """Copy the target's final norm, and the rows of its lm_head for the head's vocabulary."""
        if self.embed_tokens is not None:
            fill_normal_(self.embed_tokens.weight, self.config.hidden_size**-0.5, generator)
        if self._parts is None or self.config.hidden_size != self.config.target_hidden_size:
            return
        self.norm.weight.copy_(self._parts.norm)
        if self.lm_head is not None:
            self._copy_target_head(self.lm_head.weight, self.vocabulary().to(self._parts.head.device))


def _update_maps(head: Eagle3Head, _: object) -> None:
    """Recompute ``_to_draft``, which is not stored."""
    head.set_vocabulary(head.vocabulary())
