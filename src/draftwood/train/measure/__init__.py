"""Measurements of a head: validation, calibration, plots."""

from draftwood.train.config import ValidateSection
from draftwood.train.measure.plot import plot_log
from draftwood.train.measure.validate import BATCH, extract_prompts, score_validation, validate_head
