"""One exception family for everything a user can do wrong or a machine can refuse.

Every message says what was wrong, what was given, what is allowed and what to do next.
The command line prints the message without a stack trace and exits with 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DraftwoodError(Exception):
    """Base of the family: ``what`` went wrong, what was ``got``, what is ``allowed``, what to do ``next_step``."""

    def __init__(
        self,
        what: str,
        *,
        got: object = None,
        allowed: object = None,
        next_step: str | None = None,
    ) -> None:
        self.what = what
        self.got = got
        self.allowed = allowed
        self.next_step = next_step
        super().__init__(self._message())

    def _message(self) -> str:
        parts = [self.what]
        if self.got is not None:
            parts.append(f"got: {self.got}")
        if self.allowed is not None:
            parts.append(f"allowed: {_listing(self.allowed)}")
        if self.next_step is not None:
            parts.append(self.next_step)
        return "\n  ".join(parts)


class OptionError(DraftwoodError, ValueError):
    """An option or parameter has a value that makes no sense."""


class PromptError(DraftwoodError, ValueError):
    """A prompt cannot be generated from: empty, too long, not text."""


class ModelError(DraftwoodError):
    """A model cannot be found, fetched, read or converted."""


class CapabilityError(DraftwoodError):
    """A model or machine cannot do what was asked of it."""


class MissingExtraError(DraftwoodError, ImportError):
    """A feature needs a package that is not installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package '{package}', which is not installed",
            next_step=f"Install it with: pip install 'draftwood[{extra}]'",
        )


class TreeError(DraftwoodError, ValueError):
    """A draft tree breaks one of its invariants: a mistake in a drafter."""


def did_you_mean(name: object, known: Iterable[str], *, closeness: float = 0.6) -> str | None:
    """A next step for a name that nobody knows: the known one that is most like it, if any is."""
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=closeness)
    return f"Did you mean {near[0]!r}?" if near else None


def _listing(allowed: object) -> str:
    if isinstance(allowed, str) or not isinstance(allowed, Iterable):
        return str(allowed)
    return ", ".join(str(item) for item in allowed)
