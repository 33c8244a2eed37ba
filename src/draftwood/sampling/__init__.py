"""Logits to probabilities, and the draws from them."""

from draftwood.sampling.randomness import Randomness, SeededRandomness, tokens_at, usable
from draftwood.sampling.warp import MIN_TEMPERATURE, Warper

__all__ = ["MIN_TEMPERATURE", "Randomness", "SeededRandomness", "Warper", "tokens_at", "usable"]
