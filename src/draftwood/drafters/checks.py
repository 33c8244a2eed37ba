"""Option checks shared by several drafters."""

from typing import Any

from draftwood.config import whole
from draftwood.errors import OptionError

MAX_NGRAM = 64  # every size from min_ngram to max_ngram is indexed at every token


def check_int(options: Any, low: int, *names: str, high: int | None = None) -> None:
    for name in names:
        whole(name, getattr(options, name), low, high)


def check_order(options: Any, low: str, high: str) -> None:
    start, end = getattr(options, low), getattr(options, high)
    if start > end:
        raise OptionError(f"{low} is above {high}", got=f"{low} {start}, {high} {end}", allowed=f"{low} <= {high}")


def check_ngrams(options: Any) -> None:
    check_int(options, 1, "min_ngram", "max_ngram", high=MAX_NGRAM)
    check_order(options, "min_ngram", "max_ngram")


def check_fraction(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
            raise OptionError(f"{name} must be a fraction", got=repr(value), allowed="0 to 1")


def check_flag(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise OptionError(f"{name} must be true or false", got=repr(value), allowed=("true", "false"))


def check_choice(options: Any, name: str, allowed: tuple[str, ...]) -> None:
    if getattr(options, name) not in allowed:
        raise OptionError(f"{name} is unknown", got=repr(getattr(options, name)), allowed=allowed)


def check_top_k(top_k: int, vocab_size: int) -> None:
    """Raise if ``top_k`` exceeds the vocabulary; called once the model is known."""
    if top_k > vocab_size:
        raise OptionError(
            "top_k is larger than the model's vocabulary", got=top_k, allowed=f"1 to {vocab_size} with this model"
        )
