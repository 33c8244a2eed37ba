"""From a model's name to a target that runs and the tokenizer that speaks to it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from draftwood.config import DTYPES, TARGETS, one_of
from draftwood.errors import CapabilityError, OptionError
from draftwood.target.base import Target
from draftwood.target.load import read_json_config, resolve
from draftwood.target.native.config import is_native, parse_config
from draftwood.target.native.cpu import CpuDecoder
from draftwood.target.native.target import NativeTarget
from draftwood.target.store import Progress
from draftwood.target.tiny import ByteTokenizer, tiny_target
from draftwood.target.tokenizer import TextCodec, Tokenizer

TINY = "tiny"
MAX_CACHE_TOKENS = 65_536


class Loaded(NamedTuple):
    target: Target
    codec: TextCodec


def load_target(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    target: str = "auto",
    max_batch: int = 8,
    cache_tokens: int | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Finds, loads and places a model. ``tiny`` is the built-in random one."""
    one_of("dtype", dtype, DTYPES)
    one_of("target", target, TARGETS)
    place = pick_device(device)
    if model == TINY:
        kind = torch.float32 if dtype == "auto" else getattr(torch, dtype)
        tiny = tiny_target(dtype=kind, device=place, cache_tokens=cache_tokens or max_batch * 1024)
        return Loaded(tiny, ByteTokenizer())
    folder = resolve(model, progress)
    config, generation = read_json_config(folder.path)
    codec = Tokenizer.from_folder(folder.path)
    if target == "native" or (target == "auto" and is_native(config)):
        shape = parse_config(config, generation)
        native = NativeTarget.from_folder(
            folder.path,
            folder.name,
            shape,
            dtype=pick_dtype(dtype, place),
            device=place,
            cache_tokens=cache_tokens or min(max_batch * shape.context_length, MAX_CACHE_TOKENS),
            progress=None if progress is None else lambda done, total: progress("loading weights", done, total),
        )
        return Loaded(native, codec)
    from draftwood.target.hf import HFTarget  # transformers is an extra and slow to import

    wrapped = HFTarget.from_folder(
        folder.path,
        dtype=pick_dtype(dtype, place),
        device=place,
        name=folder.name,
        max_batch=max_batch,
        cache_tokens=cache_tokens,
        allow_plain=target == "hf-plain",
    )
    return Loaded(wrapped, codec)


def pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise OptionError("device is unknown", got=repr(device), allowed="auto, cpu, cuda, cuda:0, ...") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise CapabilityError(
            "There is no CUDA device here", got=device, next_step="Use device='cpu', or install torch with CUDA."
        )
    return place


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """bfloat16 where it is fast: on a GPU, and on a CPU with the fused decoder. Eager CPU code prefers float32."""
    if dtype != "auto":
        picked = getattr(torch, dtype)
        assert isinstance(picked, torch.dtype)
        return picked
    fast = device.type == "cuda" or CpuDecoder.is_available()
    return torch.bfloat16 if fast else torch.float32
