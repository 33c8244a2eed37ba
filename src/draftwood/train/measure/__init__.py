"""Measurements of a head: validation, calibration, plots."""

from draftwood.train.measure.plot import plot_log
from draftwood.train.measure.validate import BATCH, ValidateSection, extract_prompts, score_validation, validate_head
