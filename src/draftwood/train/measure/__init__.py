"""Measuring a head: validation, calibration, plots."""

from draftwood.train.measure.plot import plot_log
from draftwood.train.measure.validate import BATCH, prompts_of, score, validate_head

__all__ = ["BATCH", "plot_log", "prompts_of", "score", "validate_head"]
