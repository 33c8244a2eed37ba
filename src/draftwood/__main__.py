"""``python -m draftwood``: the command line."""

from draftwood.cli.main import main

raise SystemExit(main())
