"""Any causal model of transformers as a target."""

from draftwood.target.hf.target import HFTarget

__all__ = ["HFTarget"]
