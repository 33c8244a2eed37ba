"""Losses over the vocabulary."""

from draftwood.train.losses.entropy import class_cross_entropy, log_sum_exp
from draftwood.train.losses.losses import Marker, Marks, Places, calibration_error, most_logits, share, smooth_l1

__all__ = [
    "Marker",
    "Marks",
    "Places",
    "calibration_error",
    "class_cross_entropy",
    "log_sum_exp",
    "most_logits",
    "share",
    "smooth_l1",
]
