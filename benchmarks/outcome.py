"""How a script ends: what a person did wrong is told without a trace, and Ctrl-C is no mistake."""

from __future__ import annotations

import sys
from collections.abc import Callable

from draftwood.errors import DraftwoodError


def exit_code(run: Callable[[], None]) -> int:
    """Of what is run; nothing is left half written where that writes its results at its end."""
    try:
        run()
    except DraftwoodError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0
