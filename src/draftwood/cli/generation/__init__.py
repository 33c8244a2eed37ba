"""The commands ``draftwood generate``, ``chat``, ``check`` and ``serve``."""

from draftwood.cli.generation.parser import register
