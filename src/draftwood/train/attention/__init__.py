"""Causal attention along texts, and attention of unrolled steps."""

from draftwood.train.attention.causal import causal_attention
from draftwood.train.attention.unrolled import UnrolledAttention, unroll
