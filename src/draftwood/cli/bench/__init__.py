"""The command ``draftwood bench``."""

from draftwood.cli.bench.options import words
from draftwood.cli.bench.parser import register
