"""Attention along training texts and through unrolled steps."""

from draftwood.train.attention.texts import causal_attention
from draftwood.train.attention.unrolled import UnrolledAttention, unroll

__all__ = ["UnrolledAttention", "causal_attention", "unroll"]
