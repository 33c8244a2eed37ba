"""What blends believe about their sources before they have learned anything themselves.

Rates are acceptance rates by kind of hint. Weights combine the log odds of the sources that have something to say about
a guess: bias first, then one per source, without and with a source that is sure. Their key names the sources that hint
at it and, after a slash, those that are silent: "context+head/transition". The shipped file was measured on SmolLM2
with prompts of seven tasks (docs/blend.md says how); `draftwood tune --priors` measures those of another model, kept in
the cache.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from draftwood.compiled import HintSource, Learned, state_of
from draftwood.disk import cache_home, new_file
from draftwood.targets import TargetInfo

FORMAT = 2  # of weights; measured files of other formats are not read
SHIPPED = Path(__file__).with_name("blend_priors.json")
MEASURED_TRIALS, ASSUMED_TRIALS = 30.0, 8.0  # weights of measured and of assumed rates before the first trial


class Priors(NamedTuple):
    rates: Mapping[str, Sequence[float]]  # by source: of each kind
    weights: Mapping[str, Sequence[Sequence[float]]]  # by the sources of a guess: [2][1 + sources]


NO_PRIORS = Priors({}, {})  # sources start from rates by rule of thumb


def as_json(priors: Priors) -> str:
    return json.dumps(priors._asdict(), indent=1) + "\n"


def parse_priors(text: str) -> Priors:
    content = json.loads(text)
    return Priors(content["rates"], content["weights"])


def priors_path(target: TargetInfo) -> Path:
    facts = f"{FORMAT}|{target.name}|{target.vocab_size}|{target.num_parameters}"
    return cache_home() / "priors" / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"


def save_priors(priors: Priors, path: Path) -> None:
    with new_file(path) as temporary:
        temporary.write_text(as_json(priors), encoding="utf-8")


def load_priors(target: TargetInfo) -> Priors:
    """Those measured for a model, else the shipped ones; the shipped ones also for sources that were not measured."""
    shipped = shipped_priors()
    try:
        own = parse_priors(priors_path(target).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return shipped
    return Priors({**shipped.rates, **own.rates}, {**shipped.weights, **own.weights})


@cache
def shipped_priors() -> Priors:
    return parse_priors(SHIPPED.read_text(encoding="utf-8"))


def new_learned(sources: Sequence[HintSource], priors: Priors | None = None, *, learns: bool = True) -> Learned:
    """The state to start from; sources that the priors do not know start from their own rates. ``learns``: whether
    outcomes change it."""
    known = shipped_priors() if priors is None else priors
    measured = [known.rates.get(source.name, ()) for source in sources]
    learned = Learned(
        [
            (rates, MEASURED_TRIALS) if len(rates) == len(source.priors) else (source.priors, ASSUMED_TRIALS)
            for source, rates in zip(sources, measured, strict=True)
        ],
        learns=learns,
    )
    names = [source.name for source in sources]
    places = {name: number for number, name in enumerate(names)}
    for key, weights in known.weights.items():
        hinting, silent = (part.split("+") if part else [] for part in key.partition("/")[::2])
        group = [*hinting, *silent]
        own = np.asarray(weights)
        if set(group) <= set(places) and own.shape == (2, len(group) + 1):
            bits, listed = (sum(1 << places[name] for name in part) for part in (group, hinting))
            columns = [0, *(1 + places[name] for name in group)]
            learned.weights[:, state_of(bits, listed), columns] = own
    return learned


def weights_key(hinting: Sequence[str], silent: Sequence[str]) -> str:
    return "/".join("+".join(part) for part in (hinting, silent) if part)
