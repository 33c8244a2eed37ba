"""From logits to probabilities, and sampling from them."""

from draftwood.sampling.randomness import UNUSABLE, Randomness, SeededRandomness, check_drawn, draw_tokens
from draftwood.sampling.warp import MIN_TEMPERATURE, Warper
