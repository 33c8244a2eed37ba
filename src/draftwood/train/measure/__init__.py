"""Measuring a head: validation, calibration, plots."""

from draftwood.train.measure.plot import plot_log
from draftwood.train.measure.validate import BATCH, extract_prompts, score, validate_head

__all__ = ["BATCH", "extract_prompts", "plot_log", "score", "validate_head"]
