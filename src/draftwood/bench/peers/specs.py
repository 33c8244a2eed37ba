"""The peers by name: what each runs, which options it takes, and what a reader of its figures should know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from draftwood.config import DTYPES, one_of, parse_value, whole
from draftwood.errors import OptionError, did_you_mean

WORKERS = Path(__file__).parent / "workers"
LOOKUP_KINDS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
_QUANTISED = "reads a GGUF file, mostly quantised: other weights than the other methods, and other texts"
_OWN_DTYPE = "float32 on CPUs without bfloat16 units, where that is its faster one"
_NO_END = "with ignore_eos it may not choose the end token, where the others write it and go on"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSpec:
    """One way of running one engine."""

    name: str  # without options
    engine: str
    title: str  # for people
    packages: tuple[str, ...]  # what its Python must be able to import
    worker: Path  # the script that runs there
    options: Mapping[str, Any] = field(default_factory=dict)  # all of them, with their values
    required: tuple[str, ...] = ()  # options that have no default
    needs_gguf: bool = False
    note: str = ""  # what a reader of its figures should know


def _spec(name: str, title: str, package: str, note: str, **more: Any) -> PeerSpec:
    engine = name.partition(":")[0]
    packages = (package, *more.pop("packages", ()))
    worker = WORKERS / f"{engine}_worker.py"
    return PeerSpec(name=name, engine=engine, title=title, packages=packages, worker=worker, note=note, **more)


_PEERS = [
    _spec("transformers", "transformers generate", "transformers", _OWN_DTYPE, options={"dtype": "auto"}),
    _spec(
        "transformers:lookup",
        "transformers, prompt lookup",
        "transformers",
        f"{_OWN_DTYPE}; where it samples, a copied token is kept if the model draws the same one: exact",
        options={"dtype": "auto", "tokens": 10, "ngram": 2},
    ),
    _spec(
        "transformers:assisted",
        "transformers, assistant model",
        "transformers",
        f"{_OWN_DTYPE}; where it samples, by rejection against the assistant's probabilities: exact",
        options={"dtype": "auto", "model": ""},
        required=("model",),
    ),
    _spec("llamacpp", "llama.cpp", "xllamacpp", f"{_QUANTISED}; {_NO_END}", needs_gguf=True),
    _spec(
        "llamacpp:lookup",
        "llama.cpp, n-gram lookup",
        "xllamacpp",
        f"{_QUANTISED}; {_NO_END}",
        options={"kind": "ngram-simple", "ngram": 3, "tokens": 10},
        needs_gguf=True,
    ),
    _spec("vllm", "vLLM", "vllm", f"{_OWN_DTYPE}; eager on a CPU", options={"dtype": "auto"}),
    _spec(
        "vllm:ngram",
        "vLLM, n-gram",
        "vllm",
        f"{_OWN_DTYPE}; eager on a CPU",
        options={"dtype": "auto", "tokens": 5, "ngram": 4, "min_ngram": 2},
    ),
    _spec(
        "vllm:suffix",
        "vLLM, suffix decoding",
        "vllm",
        f"{_OWN_DTYPE}; eager on a CPU; remembers earlier answers only with the option cached, as in cached=10000",
        packages=("arctic_inference",),
        options={"dtype": "auto", "tokens": 24, "cached": 0},
    ),
]
PEERS = {spec.name: spec for spec in _PEERS}
ENGINES = tuple(dict.fromkeys(spec.engine for spec in _PEERS))
_MAY_BE_ZERO = ("cached",)


def list_peers() -> list[str]:
    return list(PEERS)


def find_peer(name: str) -> PeerSpec:
    """The peer of this name; options follow it, as in ``transformers:assisted,model=NAME``."""
    known, *pairs = name.split(",")
    if known not in PEERS:
        raise OptionError(
            "There is no peer of that name",
            got=repr(known),
            allowed=list_peers(),
            next_step=did_you_mean(known, PEERS),
        )
    spec = PEERS[known]
    options = dict(spec.options)
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise OptionError("A peer's option has a value", got=pair, allowed=f"as in {known},{key}=VALUE")
        if key not in options:
            raise OptionError(f"The peer {known!r} has no option {key!r}", got=name, allowed=list(options) or "none")
        options[key] = _checked(key, options[key], text)
    for key in spec.required:
        if not options[key]:
            raise OptionError(
                f"The peer {known!r} needs the option {key!r}", got=name, next_step=f"Write {known},{key}=NAME."
            )
    return replace(spec, options=options)


def _checked(key: str, default: object, text: str) -> object:
    """The value of an option, of the same kind as its default."""
    if not isinstance(default, int):
        if key == "dtype":
            return one_of("dtype", text, DTYPES)
        return one_of("kind", text, LOOKUP_KINDS) if key == "kind" else text
    return whole(key, parse_value(text), low=0 if key in _MAY_BE_ZERO else 1)
