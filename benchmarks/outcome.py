"""Exit codes of scripts: user errors are reported without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from draftwood.errors import DraftwoodError


def exit_code(run: Callable[[], None]) -> int:
    """Run a script's main function and return its exit code."""
    try:
        run()
    except DraftwoodError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0
