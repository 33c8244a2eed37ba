"""What the tests of the trainer share: data that the tiny model wrote, configurations, texts in memory, runs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

from draftwood.config import ModelOptions
from draftwood.heads import Eagle3Head, HeadModule, load_head
from draftwood.targets.load import load_target
from draftwood.train.attention.unrolled import unroll
from draftwood.train.base import Batch, Example, Losses, Signals
from draftwood.train.config import TrainConfig, load_config
from draftwood.train.data.make import make_data, prepare
from draftwood.train.data_settings import DataSettings
from draftwood.train.loop.logs import Console, read_log
from draftwood.train.loop.run import train_head
from draftwood.train.loop.trainer import Trainer
from draftwood.train.methods.base import Method
from tests.tools.train import method_for, new_head, random_examples

Tensors = dict[str, Tensor]


@cache
def data_folder(model: str = "tiny") -> str:
    """Texts of a few prompts; pytest has the temporary files removed in time."""
    folder = Path(mkdtemp(prefix="train-")) / "data"
    settings = DataSettings(self_made=24, max_tokens=12, prompt_tokens=4, batch=24)
    make_data(prepare(settings, str(folder)), load_target(ModelOptions(model=model, dtype="float32")))
    return str(folder)


def configuration(out: Path, *changes: str, method: str = "eagle3") -> TrainConfig:
    """A short run on the tiny model that validates nothing; later changes win."""
    usual = [
        "model.name=tiny",
        "model.device=cpu",
        f"data.folder={data_folder()}",
        "data.held_out=0",
        f"run.out={out}",
        "run.max_tokens=96",
        "optim.warmup_steps=2",
        "optim.steps=4",
        "optim.lr=1e-3",
    ]
    own = ["method.steps=2", "head.draft_vocab_size=100"] if method == "eagle3" else []
    return load_config(None, [*usual, *own, *changes], method)


def run(config: TrainConfig, *, resume: bool = False) -> list[dict[str, Any]]:
    """Trains without a word; the lines of its log."""
    folder = train_head(config, resume=resume, console=Console(io.StringIO()))
    return read_log(folder / "log.jsonl")


def losses(lines: Sequence[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines if line["kind"] == "train"]


def state_of(folder: Path) -> Tensors:
    return dict(load_head(folder).head.state_dict())


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class PlainMethod(Method):
    """Cross-entropy against the text itself, no unrolling: the simplest thing that can be trained."""

    name = "plain"
    kinds = ("eagle3",)
    head: Eagle3Head

    def losses(self, batch: Batch, signals: Signals) -> Losses:
        num_pairs = batch.token_ids.shape[1] - 2
        embeds = self.head.embed(batch.token_ids[:, 1:-1])
        features = self.head.fuse(signals.taps[:, :num_pairs])
        (hidden,) = unroll(self.head, embeds, features, batch.positions()[:, :num_pairs], 1)
        counted = batch.answered[:, 2:]
        logits, labels = self.head.logits(hidden)[counted], batch.token_ids[:, 2:][counted]
        total = torch.nn.functional.cross_entropy(logits, labels)
        accuracy = (logits.argmax(-1) == labels).float().mean()
        return Losses(total, {"accuracy": accuracy}, counted.sum().float())


class Texts:
    """Texts in memory, in batches that a test names: the same in every epoch."""

    def __init__(self, examples: Sequence[Example], groups: Sequence[Sequence[int]]) -> None:
        self._examples, self._groups = examples, groups

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    def batches(
        self, max_tokens: int, *, seed: int = 0, epoch: int = 0, rank: int = 0, world_size: int = 1, start: int = 0
    ) -> list[Sequence[int]]:
        return list(self._groups[rank::world_size][start:])


def plain_trainer(
    groups: Sequence[Sequence[int]], *changes: str, steps: int = 4, cls: type[PlainMethod] = PlainMethod
) -> Trainer:
    """Over random texts of several lengths; a new head each time, always the same one."""
    head: HeadModule = new_head("eagle3")
    frozen = method_for("eagle3", head).frozen
    method = cls(None, head, frozen)
    examples = random_examples([6, 9, 14, 20, 8, 11], prompt=3)
    config = configuration(Path("nowhere"), *changes)
    return Trainer(config, method, Texts(examples, groups), frozen, steps)
