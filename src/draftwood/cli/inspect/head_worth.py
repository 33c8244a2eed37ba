"""Evaluate a head on texts that its model generated, as validation during training does."""

import argparse
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from draftwood.cli.console import Screen
from draftwood.cli.inspect.head_options import DEFAULTS, MAX_LENGTH, SECTION
from draftwood.config import ModelOptions
from draftwood.errors import OptionError
from draftwood.heads import HeadModule
from draftwood.targets import load_target, pick_device
from draftwood.train.data import Example, TrainingData
from draftwood.train.loop import choose_dtype, measure_coverage
from draftwood.train.measure import BATCH, ValidateSection, extract_prompts, validate_head


def measure_worth(args: argparse.Namespace, head: HeadModule, screen: Screen) -> dict[str, Any]:
    """Return the settings, the data used and the results: ``coverage`` of the vocabulary, ``trees`` by growth,
    ``accuracy``, ``ranks``."""
    section, seed, max_length = _build_section(args), args.seed or 0, args.max_length or MAX_LENGTH
    data = TrainingData.open(*args.texts, max_length=max_length)
    if not len(data):
        got = f"no answer within the first {max_length} tokens of any text in {', '.join(args.texts)}"
        raise OptionError("No usable texts", got=got, next_step="Raise --max-length.")
    texts = _choose_texts(data, section.texts, seed)
    device, dtype = pick_device(args.device or "auto"), args.dtype or "auto"
    if dtype == "auto":  # as in training: half precision is slow in torch on a CPU
        dtype = str(choose_dtype(dtype, device)).removeprefix("torch.")
    options = ModelOptions(model=args.model, dtype=dtype, device=str(device), max_batch=BATCH)
    target, codec = load_target(options, screen.progress)
    data.check_model(target)
    found = validate_head(head, target, codec, texts, section, screen.progress)
    trees = found.pop("trees", {})
    found.pop("tau", None)  # mean over growths, the criterion of training
    screen.progress.clear()
    used = {"texts": len(texts), "texts_there": len(data), "prompts": len(extract_prompts(texts, section.prompts))}
    ran = {"dtype": dtype, "device": str(device), "coverage": measure_coverage(head, data)}
    return {"folders": args.texts, "seed": seed, **ran, **asdict(section), **used, "trees": trees, **found}


def _build_section(args: argparse.Namespace) -> ValidateSection:
    given = {SECTION.get(name, name): getattr(args, name) for name in (*DEFAULTS, "growth")}
    return ValidateSection(**{name: value for name, value in given.items() if value is not None})


def _choose_texts(data: TrainingData, limit: int, seed: int) -> list[Example]:
    """Choose the texts that training with this seed would hold out."""
    with suppress(OptionError):  # not enough texts to split: use all
        _, data = data.split(limit, seed)
    return data.shuffled(seed)[:limit]
