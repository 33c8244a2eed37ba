"""Training of draft heads on text that the target generated: one trainer, one loss per method."""

from draftwood.train.base import Example
from draftwood.train.config import ValidateSection

__all__ = ["Example", "ValidateSection"]
