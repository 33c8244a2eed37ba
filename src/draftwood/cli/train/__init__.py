"""The commands ``draftwood train`` and ``draftwood export``."""

from draftwood.cli.train.parser import register
