"""Tree attention in Triton."""

from draftwood.targets.native.cuda.attention.forest import forest_attention
from draftwood.targets.native.cuda.attention.kernel import tree_attention
from draftwood.targets.native.cuda.attention.plan import (
    LEAST_WORDS,
    TILE_FIELDS,
    WORD_BITS,
    bits_needed,
    choose,
    most_tiles,
    scratch_size,
    words_per_row,
    write_plan,
)

__all__ = [
    "LEAST_WORDS",
    "TILE_FIELDS",
    "WORD_BITS",
    "bits_needed",
    "choose",
    "forest_attention",
    "most_tiles",
    "scratch_size",
    "tree_attention",
    "words_per_row",
    "write_plan",
]
