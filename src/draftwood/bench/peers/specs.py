"""The peers by name, with their options and notes for the report."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from draftwood.config import DTYPES, one_of, parse_value, whole
from draftwood.errors import OptionError, did_you_mean

WORKERS = Path(__file__).parent / "workers"
LOOKUP_KINDS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
_QUANTIZED = "reads a GGUF file, usually quantized: weights and outputs differ from the other methods"
_OWN_DTYPE = "float32 on CPUs without bfloat16 support, where it is faster"
_NO_END = "with ignore_eos it never generates the end token, while the others generate it and continue"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSpec:
    """One way of running one engine."""

    name: str  # without options
    engine: str
    title: str
    packages: tuple[str, ...]  # that its Python must be able to import
    worker: Path  # the script to run
    options: Mapping[str, Any] = field(default_factory=dict)  # with defaults
    required: tuple[str, ...] = ()  # options without a default
    needs_gguf: bool = False
    note: str = ""  # caveats shown in the report


def _make_spec(name: str, title: str, package: str, note: str, **more: Any) -> PeerSpec:
    engine = name.partition(":")[0]
    packages = (package, *more.pop("packages", ()))
    worker = WORKERS / f"{engine}_worker.py"
    return PeerSpec(name=name, engine=engine, title=title, packages=packages, worker=worker, note=note, **more)


_PEERS = [
    _make_spec("transformers", "transformers generate", "transformers", _OWN_DTYPE, options={"dtype": "auto"}),
    _make_spec(
        "transformers:lookup",
        "transformers, prompt lookup",
        "transformers",
        f"{_OWN_DTYPE}; sampling is exact: a copied token is kept if the model samples the same one",
        options={"dtype": "auto", "tokens": 10, "ngram": 2},
    ),
    _make_spec(
        "transformers:assisted",
        "transformers, assistant model",
        "transformers",
        f"{_OWN_DTYPE}; sampling is exact: rejection sampling against the assistant",
        options={"dtype": "auto", "model": ""},
        required=("model",),
    ),
    _make_spec("llamacpp", "llama.cpp", "xllamacpp", f"{_QUANTIZED}; {_NO_END}", needs_gguf=True),
    _make_spec(
        "llamacpp:lookup",
        "llama.cpp, n-gram lookup",
        "xllamacpp",
        f"{_QUANTIZED}; {_NO_END}",
        options={"kind": "ngram-simple", "ngram": 3, "tokens": 10},
        needs_gguf=True,
    ),
    _make_spec("vllm", "vLLM", "vllm", f"{_OWN_DTYPE}; eager on a CPU", options={"dtype": "auto"}),
    _make_spec(
        "vllm:ngram",
        "vLLM, n-gram",
        "vllm",
        f"{_OWN_DTYPE}; eager on a CPU",
        options={"dtype": "auto", "tokens": 5, "ngram": 4, "min_ngram": 2},
    ),
    _make_spec(
        "vllm:suffix",
        "vLLM, suffix decoding",
        "vllm",
        f"{_OWN_DTYPE}; eager on a CPU; uses earlier outputs only with the option cached, as in cached=10000",
        packages=("arctic_inference",),
        options={"dtype": "auto", "tokens": 24, "cached": 0},
    ),
    _make_spec(
        "vllm:draftwood",
        "vLLM, Draftwood's proposer",
        "vllm",
        f"{_OWN_DTYPE}; eager on a CPU; uses earlier outputs only with the option memory, as in memory=1000000",
        options={"dtype": "auto", "tokens": 16, "memory": 0},
    ),
]
PEERS = {spec.name: spec for spec in _PEERS}
ENGINES = tuple(dict.fromkeys(spec.engine for spec in _PEERS))
_MAY_BE_ZERO = ("cached", "memory")


def list_peers() -> list[str]:
    return list(PEERS)


def find_peer(name: str) -> PeerSpec:
    """Find a peer by name and options, as in ``transformers:assisted,model=NAME``."""
    known, *pairs = name.split(",")
    if known not in PEERS:
        raise OptionError("Unknown peer", got=repr(known), allowed=list_peers(), next_step=did_you_mean(known, PEERS))
    spec = PEERS[known]
    options = dict(spec.options)
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise OptionError("A peer's option needs a value", got=pair, allowed=f"as in {known},{key}=VALUE")
        if key not in options:
            raise OptionError(f"The peer {known!r} has no option {key!r}", got=name, allowed=list(options) or "none")
        options[key] = _parse_option(key, options[key], text)
    for key in spec.required:
        if not options[key]:
            raise OptionError(
                f"The peer {known!r} needs the option {key!r}", got=name, next_step=f"Write {known},{key}=NAME."
            )
    return replace(spec, options=options)


def _parse_option(key: str, default: object, text: str) -> object:
    """Parse the value of an option, of the same type as its default."""
    if not isinstance(default, int):
        if key == "dtype":
            return one_of("dtype", text, DTYPES)
        return one_of("kind", text, LOOKUP_KINDS) if key == "kind" else text
    return whole(key, parse_value(text), low=0 if key in _MAY_BE_ZERO else 1)
