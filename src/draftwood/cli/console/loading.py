"""Load the model of a command and describe it."""

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
    """Load the model and drafter given by the options."""
    options = drafter_options(args.drafter_option)

    warnings.filterwarnings("ignore", "Decoding is slow")  # replaced by the note below
    llm = LLM(
        drafter=args.drafter,
        drafter_options=options,
        memory=args.memory,
        budget=args.budget,
        progress=screen.progress,
        **asdict(model_options(args, max_batch=max_batch, cache_tokens=cache_tokens)),
    )
    if _slow_on_cpu(llm.info):
        screen.note(_explain_slow(llm.info))
    return llm


def run_info(args: argparse.Namespace, llm: LLM) -> dict[str, Any]:
    """Describe model, device, drafter and budget for JSON output."""
    info = llm.info
    return {
        "model": info.name,
        "backend": info.backend,
        "dtype": dtype_name(info),
        "device": str(info.device),
        "drafter": llm.drafter,
        "budget": args.budget,
    }


def dtype_name(info: TargetInfo) -> str:
    return str(info.dtype).removeprefix("torch.")


def budget_text(args: argparse.Namespace) -> str:
    return f"budget {args.budget}"


def _slow_on_cpu(info: TargetInfo) -> bool:
    return info.backend == "eager" and info.device.type == "cpu"


def _explain_slow(info: TargetInfo) -> str:
    why = CpuDecoder.why_unavailable()
    if why:
        return f"Using the slow eager decoder: {why}."
    return (
        f"Using the slow eager decoder: the fast one does not support this model in {dtype_name(info)}.\n"
        "  Try --dtype float32 or --dtype bfloat16."
    )
