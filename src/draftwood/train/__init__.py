"""Training draft heads: data that the target itself wrote, one trainer, a loss for each method."""

from draftwood.train.base import Example
from draftwood.train.config import ValidateSection

__all__ = ["Example", "ValidateSection"]
