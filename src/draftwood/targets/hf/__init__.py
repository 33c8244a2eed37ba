"""Any causal language model of transformers as a target."""

from draftwood.targets.hf.target import HFTarget
