"""The fused decoder for CPUs: one C call per forward."""

from draftwood.targets.native.cpu.decoder import CpuDecoder

__all__ = ["CpuDecoder"]
