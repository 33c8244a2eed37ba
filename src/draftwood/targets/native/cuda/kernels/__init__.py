"""Small kernels between the products and passes: embeddings, norms, gates, cache moves, top entries, drawn tokens,
picked nodes, accepted paths."""

from draftwood.targets.native.cuda.kernels import rows
from draftwood.targets.native.cuda.kernels.draw import MAX_VOCABULARY, DrawScratch, launch_draws
from draftwood.targets.native.cuda.kernels.follow import GIVEN, MAX_FOLLOWED, follow_path
from draftwood.targets.native.cuda.kernels.pick import LIMITS, pick_nodes
from draftwood.targets.native.cuda.kernels.top import block_size, launch_top_rows, new_scratch, new_words, top_words
