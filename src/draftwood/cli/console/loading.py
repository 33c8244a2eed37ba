"""The model a command runs, and what is told about it."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import asdict
from typing import Any

from draftwood.cli.console.terminal import Screen
from draftwood.cli.options import drafter_options, model_options
from draftwood.llm import LLM
from draftwood.targets import TargetInfo
from draftwood.targets.native.cpu import CpuDecoder


def load_llm(args: argparse.Namespace, screen: Screen, max_batch: int = 1, cache_tokens: int | None = None) -> LLM:
    """The model and drafter the options ask for; what was not given is left to the library."""
    options = drafter_options(args.drafter_option)

    warnings.filterwarnings("ignore", "Decoding is slow")  # the note below takes its place
    llm = LLM(
        drafter=args.drafter,
        drafter_options=options,
        memory=args.memory,
        budget=args.budget,
        progress=screen.progress,
        **asdict(model_options(args, max_batch=max_batch, cache_tokens=cache_tokens)),
    )
    if _slow_on_cpu(llm.info):
        screen.note(_why_slow(llm.info))
    return llm


def facts(llm: LLM) -> dict[str, Any]:
    """What runs, for JSON."""
    info = llm.info
    return {
        "model": info.name,
        "backend": info.backend,
        "dtype": dtype_name(info),
        "device": str(info.device),
        "drafter": llm.drafter,
        "budget": llm.budget,
    }


def dtype_name(info: TargetInfo) -> str:
    return str(info.dtype).removeprefix("torch.")


def budget_text(args: argparse.Namespace, llm: LLM) -> str:
    """The budget that was asked for: under ``auto`` the library's own number is only the most it ever takes."""
    return "budget auto" if args.budget == "auto" else f"budget {llm.budget}"


def _slow_on_cpu(info: TargetInfo) -> bool:
    return info.backend == "eager" and info.device.type == "cpu"


def _why_slow(info: TargetInfo) -> str:
    why = CpuDecoder.why_unavailable()
    if why:
        return f"The slow eager decoder runs: {why}."
    return (
        f"The slow eager decoder runs: the fast one cannot take this model in {dtype_name(info)}.\n"
        "  Try --dtype float32 or --dtype bfloat16."
    )
