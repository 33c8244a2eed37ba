"""Cross-entropies over the vocabulary, and the evaluation of a head's predictions."""

from draftwood.train.losses.entropy import class_cross_entropy, log_sum_exp
from draftwood.train.losses.evaluator import (
    Evaluation,
    Evaluator,
    Positions,
    accuracy,
    calibration_error,
    max_logits,
    smooth_l1,
)
