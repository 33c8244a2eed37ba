"""Loads a model by name: the target that runs it, and its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from draftwood.config import DTYPES, QUANTIZE, TARGETS, one_of
from draftwood.errors import CapabilityError, ModelError, OptionError
from draftwood.models import BUILT_IN, ModelConfig, ModelFolder, is_native, parse_config, read_json_config, resolve
from draftwood.progress import Progress
from draftwood.targets.base import Target
from draftwood.targets.native import NativeTarget, cuda
from draftwood.targets.native.cpu import CpuDecoder
from draftwood.targets.room import check_room, default_cache_tokens, out_of_memory
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from draftwood.text import ByteTokenizer, TextCodec, Tokenizer

_DEVICES = "auto, cpu, cuda, cuda:0, ..."


class Loaded(NamedTuple):
    target: Target
    codec: TextCodec


def load_target(
    model: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    quantize: str | None = None,
    device: str = "auto",
    target: str = "auto",
    max_batch: int = 8,
    cache_tokens: int | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Finds and loads a model. ``tiny`` is the built-in random one.

    ``target``: "native" is our own decoder; "hf" is transformers; "hf-plain" is transformers, plain decoding allowed
    where the model cannot run trees; "auto" is native where it can be, else "hf". ``quantize``: "fp8" or "int8" hold
    the weights in 8 bits, on a GPU.
    """
    one_of("dtype", dtype, DTYPES)
    one_of("target", target, TARGETS)
    name = _name_of(model)
    place = pick_device(device)
    if quantize is not None:
        one_of("quantize", quantize, QUANTIZE)
        _check_quantize(quantize, cuda.why_not_on(place, quantize))  # before anything is fetched
    if name == BUILT_IN:
        slots = cache_tokens or default_cache_tokens(max_batch, TINY_CONFIG.context_length)
        return _load_tiny(dtype, quantize, place, target, slots)
    folder = resolve(name, progress)
    config, generation = read_json_config(folder.path)
    codec = Tokenizer.from_folder(folder.path)
    kind = pick_dtype(dtype, place)
    if target == "native" or (target == "auto" and is_native(config)):
        shape = parse_config(config, generation)
        slots = cache_tokens or default_cache_tokens(max_batch, shape.context_length)
        return Loaded(_load_native(folder, shape, kind, quantize, place, slots, progress), codec)
    if quantize is not None:
        _check_quantize(quantize, "transformers runs this model")
    from draftwood.targets.hf import HFTarget  # transformers is an extra and slow to import

    with _memory_explained(place):
        wrapped = HFTarget.from_folder(
            folder.path,
            dtype=kind,
            device=place,
            name=folder.name,
            max_batch=max_batch,
            cache_tokens=cache_tokens,
            allow_plain=target == "hf-plain",
        )
    return Loaded(wrapped, codec)


def _name_of(model: object) -> str:
    """A text is any kind of name; a path is a place on this disk and nothing else."""
    if isinstance(model, str):
        return model
    place = os.fspath(model) if isinstance(model, os.PathLike) else None
    if isinstance(place, str):
        return str(Path(place).expanduser().absolute())
    raise ModelError(
        "A model is asked for by its name or its path",
        got=repr(model),
        allowed="a text or a Path",
        next_step="Give a known name, a folder in Hugging Face layout, a .gguf file or a hub id (org/name).",
    )


def _check_quantize(quantize: str, why: str) -> None:
    """Refuses weights in 8 bits if there is a reason."""
    if why:
        raise CapabilityError(
            "Weights in 8 bits need the fused GPU decoder",
            got=f"quantize={quantize!r}: {why}",
            allowed="native models in bfloat16 or float16 on a CUDA GPU, fp8 from compute capability 8.9 on",
            next_step="Leave quantize out, or use another device, dtype or target.",
        )


def _load_tiny(dtype: str, quantize: str | None, place: torch.device, target: str, cache_tokens: int) -> Loaded:
    if target not in ("auto", "native"):
        raise OptionError(
            f"The built-in model {BUILT_IN!r} runs on the native target only",
            got=f"target={target!r}",
            allowed=("auto", "native"),
            next_step="Leave target out, or name a model folder.",
        )
    kind = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    if quantize is not None:
        _check_quantize(quantize, cuda.why_unavailable(TINY_CONFIG, kind, place, quantize))
    check_room(cache_tokens, TINY_CONFIG.cache_bytes_per_token(kind.itemsize), place)
    model = tiny_target(dtype=kind, quantize=quantize, device=place, cache_tokens=cache_tokens)
    return Loaded(model, ByteTokenizer())


def _load_native(
    folder: ModelFolder,
    shape: ModelConfig,
    dtype: torch.dtype,
    quantize: str | None,
    place: torch.device,
    cache_tokens: int,
    progress: Progress | None,
) -> NativeTarget:
    if quantize is not None:
        _check_quantize(quantize, cuda.why_unavailable(shape, dtype, place, quantize))
    bytes_per_token = shape.cache_bytes_per_token(dtype.itemsize)
    check_room(cache_tokens, bytes_per_token, place)
    with _memory_explained(place, cache_tokens * bytes_per_token):
        return NativeTarget.from_folder(
            folder.path,
            folder.name,
            shape,
            dtype=dtype,
            quantize=quantize,
            device=place,
            cache_tokens=cache_tokens,
            progress=None if progress is None else lambda done, total: progress("loading weights", done, total),
        )


@contextmanager
def _memory_explained(place: torch.device, cache_bytes: int | None = None) -> Iterator[None]:
    try:
        yield
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        raise out_of_memory(place, cache_bytes) from error


def pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device) if isinstance(device, (str, torch.device)) else None
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cpu", "cuda"):
        raise OptionError("device must be the CPU or a CUDA device", got=repr(device), allowed=_DEVICES)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise CapabilityError(
            "There is no CUDA device here", got=device, next_step="Use device='cpu', or install torch with CUDA."
        )
    try:
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise CapabilityError(
            "There is no such device here",
            got=device,
            allowed=["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))],
            next_step="Leave device out to have one chosen.",
        ) from error
    return place


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """bfloat16 where it is fast: on a GPU, and on a CPU with the fused decoder. Eager CPU code prefers float32."""
    if dtype != "auto":
        picked = getattr(torch, dtype)
        assert isinstance(picked, torch.dtype)
        return picked
    fast = device.type == "cuda" or CpuDecoder.is_available()
    return torch.bfloat16 if fast else torch.float32
