"""Draft heads of the EAGLE family in the kernels of the native target."""

from draftwood.targets.native.cuda.features.decoder import FeatureDecoder
from draftwood.targets.native.cuda.features.weights import MOST_FEATURES, FeatureWeights

__all__ = ["MOST_FEATURES", "FeatureDecoder", "FeatureWeights"]
