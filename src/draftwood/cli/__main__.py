"""``python -m draftwood.cli``: the same as the ``draftwood`` command."""

from __future__ import annotations

import sys

from draftwood.cli.main import main

sys.exit(main())
