"""The commands ``draftwood models``, ``drafters``, ``datastore`` and ``tune``."""

from draftwood.cli.setup.parser import register
