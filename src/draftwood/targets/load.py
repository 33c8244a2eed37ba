"""Loads a model by name: the target that runs it, and its tokenizer."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from draftwood.config import CPU_FORMATS, GPU_FORMATS, ModelOptions
from draftwood.errors import CapabilityError, ModelError, OptionError
from draftwood.models import (
    BUILT_IN,
    ModelConfig,
    ModelFolder,
    expand,
    is_native,
    parse_config,
    read_json_config,
    resolve,
    stored_file,
)
from draftwood.progress import Progress, report
from draftwood.targets.base import Target
from draftwood.targets.native import NativeTarget, cuda
from draftwood.targets.native.cpu import CpuDecoder
from draftwood.targets.room import check_room, default_cache_tokens, out_of_memory
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from draftwood.text import ByteTokenizer, TextCodec, Tokenizer

COMPILING = "compiling the CPU kernel, once for this machine"
_DEVICES = "auto, cpu, cuda, cuda:0, ..."


class Loaded(NamedTuple):
    target: Target
    codec: TextCodec


def load_target(options: ModelOptions, progress: Progress | None = None) -> Loaded:
    """Finds, loads and places a model. ``tiny`` is the built-in random one."""
    name = _name_of(options.model)
    place = pick_device(options.device)
    _check_quantize(options, _why_not_quantized_on(options.quantize, place))  # before anything is fetched
    if place.type == "cpu" and CpuDecoder.needs_build():
        report(progress, COMPILING, 0, 1)
        CpuDecoder.is_available()
        report(progress, COMPILING, 1, 1)
    if name == BUILT_IN:
        return _load_tiny(options, place)
    folder = resolve(name, progress)
    config, generation = read_json_config(folder.path)
    codec = Tokenizer.from_folder(folder.path)
    if options.target == "native" or (options.target == "auto" and is_native(config)):
        return Loaded(_load_native(options, folder, parse_config(config, generation), place, progress), codec)
    _check_quantize(options, "transformers runs this model")
    if options.exact:
        raise CapabilityError(
            "Exact passes need a fused decoder",
            got="transformers runs this model",
            allowed="native models on a CPU with a C compiler, or in bfloat16 or float16 on a CUDA GPU",
            next_step="Leave exact out, or use another model.",
        )
    expand(folder.path, progress)
    from draftwood.targets.hf import HFTarget  # transformers is an extra and slow to import

    with _memory_explained(place):
        wrapped = HFTarget.from_folder(
            folder.path,
            dtype=pick_dtype(options.dtype, place),
            device=place,
            name=folder.name,
            max_batch=options.max_batch,
            cache_tokens=options.cache_tokens,
            allow_plain=options.target == "hf-plain",
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


def _check_quantize(options: ModelOptions, why: str) -> None:
    """Raises CapabilityError if there is a reason why weights cannot be quantised as asked."""
    if options.quantize is None or not why:
        return
    on_cpu = options.quantize in CPU_FORMATS
    raise CapabilityError(
        f"Weights in {options.quantize} need the fused {'CPU' if on_cpu else 'GPU'} decoder",
        got=f"quantize {options.quantize}: {why}",
        allowed=f"native models on a CPU, or quantize {' or '.join(GPU_FORMATS)} on a GPU"
        if on_cpu
        else "native models in bfloat16 or float16 on a CUDA GPU, fp8 from compute capability 8.9 on; "
        f"quantize {' or '.join(CPU_FORMATS)} on a CPU",
        next_step="Leave quantize out, or use another device, dtype or target.",
    )


def _why_not_quantized_on(quantize: str | None, place: torch.device) -> str:
    """Why no model can run with such weights on a device; empty if one can."""
    if quantize in CPU_FORMATS:
        return "not a CPU" if place.type != "cpu" else CpuDecoder.why_unavailable()
    return cuda.why_not_on(place, quantize)


def _load_tiny(options: ModelOptions, place: torch.device) -> Loaded:
    if options.target not in ("auto", "native"):
        raise OptionError(
            f"The built-in model {BUILT_IN!r} runs on the native target only",
            got=f"target {options.target}",
            allowed=("auto", "native"),
            next_step="Leave target out, or name a model folder.",
        )
    dtype = torch.float32 if options.dtype == "auto" else getattr(torch, options.dtype)
    slots = _checked_slots(options, TINY_CONFIG, dtype, place)
    quantize, exact = options.quantize, options.exact
    model = tiny_target(dtype=dtype, quantize=quantize, exact=exact, device=place, cache_tokens=slots)
    return Loaded(model, ByteTokenizer())


def _load_native(
    options: ModelOptions, folder: ModelFolder, shape: ModelConfig, place: torch.device, progress: Progress | None
) -> NativeTarget:
    dtype = pick_dtype(options.dtype, place)
    slots = _checked_slots(options, shape, dtype, place)
    stored = stored_file(folder.path)
    # A dtype asks for weights in that dtype, quantize for other ones than those stored.
    as_stored = (
        options.dtype == "auto" and options.quantize is None and not CpuDecoder.why_declined(shape, dtype, place)
    )
    with _memory_explained(place, slots * shape.cache_bytes_per_token(dtype.itemsize)):
        target = None
        if stored is not None and as_stored:
            target = NativeTarget.from_stored(
                stored, folder.name, shape, dtype=dtype, cache_tokens=slots, progress=_labelled(progress)
            )
        if target is not None:
            return target
        expand(folder.path, progress)
        return NativeTarget.from_folder(
            folder.path,
            folder.name,
            shape,
            dtype=dtype,
            quantize=options.quantize,
            exact=options.exact,
            device=place,
            cache_tokens=slots,
            progress=_labelled(progress),
        )


def _labelled(progress: Progress | None) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress("loading weights", done, total)


def _checked_slots(options: ModelOptions, shape: ModelConfig, dtype: torch.dtype, place: torch.device) -> int:
    """Positions of the cache, after a check that the model can run with these options and that the cache fits."""
    if options.quantize in CPU_FORMATS:
        _check_quantize(options, CpuDecoder.why_declined(shape, dtype, place))
    else:
        _check_quantize(options, cuda.why_unavailable(shape, dtype, place, options.quantize))
    slots = options.cache_tokens or default_cache_tokens(options.max_batch, shape.context_length)
    check_room(slots, shape.cache_bytes_per_token(dtype.itemsize), place)
    return slots


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
            "There is no CUDA device here", got=device, next_step="Use device=cpu, or install torch with CUDA."
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
