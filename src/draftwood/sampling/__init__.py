"""Logits to probabilities, and the draws from them."""

from draftwood.sampling.randomness import Randomness, SeededRandomness, tokens_at, usable
from draftwood.sampling.warp import Warper

__all__ = ["Randomness", "SeededRandomness", "Warper", "tokens_at", "usable"]
