"""The command ``draftwood inspect``."""

from draftwood.cli.inspect.parser import register
