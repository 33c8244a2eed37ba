"""Exceptions for invalid input and for what the machine or model cannot do.

Each message states what is wrong, the value given, the allowed values and the next step. Each error also has a stable
``code``, so that programs never need to parse the message. The command line prints the message without a stack trace
and exits with status 2.
"""

import difflib
from collections.abc import Iterable

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # code of a prompt or text that does not fit into the context


class DraftwoodError(Exception):
    """Base class of all errors that users see.

    ``what`` is wrong, ``got`` is the value given, ``allowed`` the accepted values, ``next_step`` the suggested fix.
    ``code`` identifies the kind of error; ``param`` is the option or request field with the error, if there is one.
    """

    code = "error"

    def __init__(
        self,
        what: str,
        *,
        got: object = None,
        allowed: object = None,
        next_step: str | None = None,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        self.what = what
        self.got = got
        self.allowed = allowed
        self.next_step = next_step
        self.code = code or self.code
        self.param = param
        lines = [what]
        if got is not None:
            lines.append(f"got: {got}")
        if allowed is not None:
            lines.append(f"allowed: {_format_allowed(allowed)}")
        if next_step is not None:
            lines.append(next_step)
        super().__init__("\n  ".join(lines))


class OptionError(DraftwoodError, ValueError):
    """An option or parameter has an invalid value."""

    code = "invalid_value"


class PromptError(DraftwoodError, ValueError):
    """A prompt cannot be used: it is empty, too long or not text."""

    code = "invalid_prompt"


class ModelError(DraftwoodError):
    """A model cannot be found, downloaded, read or converted."""

    code = "model_error"


class CapabilityError(DraftwoodError):
    """The model or the machine does not support the requested feature."""

    code = "not_supported"


class MissingExtraError(DraftwoodError, ImportError):
    """A feature needs a package that is not installed."""

    code = "missing_package"

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package '{package}', which is not installed",
            next_step=f"Install it with: pip install 'draftwood[{extra}]'",
        )


class TreeError(DraftwoodError, ValueError):
    """A draft tree breaks one of its invariants, which is a bug in a drafter."""

    code = "invalid_tree"


def did_you_mean(name: object, known: Iterable[str], *, closeness: float = 0.6) -> str | None:
    """Suggest the known name most similar to an unknown one, as a ``next_step``. None if no name is similar."""
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=closeness)
    return f"Did you mean {near[0]!r}?" if near else None


def _format_allowed(allowed: object) -> str:
    if isinstance(allowed, str) or not isinstance(allowed, Iterable):
        return str(allowed)
    return ", ".join(str(item) for item in allowed)
