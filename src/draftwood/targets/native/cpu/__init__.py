"""The fused CPU decoder: one C call per forward."""

from draftwood.targets.native.cpu.build import load_kernel
from draftwood.targets.native.cpu.decoder import CpuDecoder
from draftwood.targets.native.cpu.features import CpuFeatureDecoder
