"""The command ``draftwood bench``."""

from draftwood.cli.bench.options import words

__all__ = ["words"]
