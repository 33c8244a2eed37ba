"""Logits to probabilities, and the draws from them."""

from draftwood.sampling.randomness import Randomness, SeededRandomness
from draftwood.sampling.warp import Warper

__all__ = ["Randomness", "SeededRandomness", "Warper"]
