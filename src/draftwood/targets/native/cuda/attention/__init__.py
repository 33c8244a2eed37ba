"""Tree attention in Triton."""

from draftwood.targets.native.cuda.attention.forest import forest_attention
from draftwood.targets.native.cuda.attention.kernel import tree_attention
from draftwood.targets.native.cuda.attention.ordered import ordered_attention
from draftwood.targets.native.cuda.attention.paths import write_path
from draftwood.targets.native.cuda.attention.plan import (
    MIN_WORDS,
    TILE_FIELDS,
    WORD_BITS,
    choose_config,
    count_bits,
    max_tiles,
    scratch_size,
    words_per_row,
    write_plan,
)
from draftwood.targets.native.cuda.attention.ranges import choose_ordered_config, ordered_scratch_size
