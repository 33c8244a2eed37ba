"""EAGLE draft heads in the kernels of the native target."""

from draftwood.targets.native.cuda.features.decoder import FeatureDecoder
from draftwood.targets.native.cuda.features.weights import MAX_FEATURES, FeatureWeights
