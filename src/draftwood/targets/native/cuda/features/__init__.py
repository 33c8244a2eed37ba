"""EAGLE draft heads in the kernels of the native target."""

from draftwood.targets.native.cuda.features.decoder import FeatureDecoder, GivenStates
from draftwood.targets.native.cuda.features.weights import MAX_FEATURES, FeatureWeights
