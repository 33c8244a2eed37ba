"""The successor table of a model: top successors of each token without further context.

Every token is placed after a neutral first token, many at once as the children of one node, and the target's top
predictions after each are stored. This takes one pass over the vocabulary, once per model. The table is kept in the
cache folder and lets transition drafters draft from their first cycle on.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from draftwood.disk import cache_home, new_file
from draftwood.progress import Progress, report
from draftwood.sources.rowtable import NOTHING, in_vocabulary
from draftwood.sources.transitions import SuccessorArrays
from draftwood.targets import Segment, Target, TargetInfo, top_rows

WIDTH = 10  # successors per token
CHUNK = 256  # vocabulary tokens per pass
FORMAT = "draftwood-successors-1"


def successors_path(target: TargetInfo) -> Path:
    """Path of the table of a model. All dtypes share it, since they hardly differ."""
    shape = (
        f"{target.architecture}|{target.vocab_size}|{target.hidden_size}|{target.num_layers}|{target.num_parameters}"
    )
    digest = hashlib.sha256(f"{target.name}|{shape}".encode()).hexdigest()[:16]
    return cache_home() / "successors" / f"{digest}.safetensors"


def load_successors(target: TargetInfo, width: int) -> SuccessorArrays | None:
    """Load the first ``width`` successors of every token; None if there is no readable table."""
    try:
        with safe_open(successors_path(target), framework="numpy") as file:
            if (file.metadata() or {}).get("format") != FORMAT:
                return None
            ids, scores = file.get_tensor("ids"), file.get_tensor("scores")
    except (OSError, SafetensorError):
        return None
    if ids.dtype != np.int32 or scores.dtype != np.float32 or not np.isfinite(scores).all():
        return None
    if ids.shape != (target.vocab_size, WIDTH) or scores.shape != ids.shape:
        return None
    if not in_vocabulary(ids, target.vocab_size):
        return None
    return SuccessorArrays(_resize(ids, width, NOTHING), _resize(scores, width, 0.0))


def build_successors(target: Target, beginning: int, progress: Progress | None = None) -> SuccessorArrays:
    """``beginning`` is the token before all others, such as the BOS token."""
    info = target.info
    ids = np.full((info.vocab_size, WIDTH), NOTHING, dtype=np.int32)
    scores = np.zeros((info.vocab_size, WIDTH), dtype=np.float32)
    width = min(WIDTH, info.vocab_size)
    chunk = min(CHUNK, target.num_slots - 1)
    sequence = target.open(chunk + 1)
    try:
        for start in range(0, info.vocab_size, chunk):
            report(progress, "successors of each token", start, info.vocab_size)
            tokens = range(start, min(start + chunk, info.vocab_size))
            parents = [-1, *[0] * len(tokens)]
            output = target.forward([Segment(sequence, [beginning, *tokens], parents, len(tokens))])
            top = top_rows(output.logits, width)
            ids[tokens.start : tokens.stop, :width] = top.ids
            scores[tokens.start : tokens.stop, :width] = top.probs()
    finally:
        target.close(sequence)
    report(progress, "successors of each token", info.vocab_size, info.vocab_size)
    return SuccessorArrays(ids, scores)


def save_successors(target: TargetInfo, table: SuccessorArrays) -> Path:
    path = successors_path(target)
    with new_file(path) as temporary:
        save_file({"ids": table.ids, "scores": table.scores}, temporary, {"format": FORMAT, "model": target.name})
    return path


def _resize(rows: npt.NDArray[Any], width: int, filler: float) -> npt.NDArray[Any]:
    """Truncate or pad to [V, width]."""
    missing = max(0, width - rows.shape[1])
    return np.pad(rows[:, :width], ((0, 0), (0, missing)), constant_values=filler)
