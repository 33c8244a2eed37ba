"""Tests whether the gradient of a tree loss points where its own reward rises.

    python benchmarks/tree_direction.py head.start=HEAD 'data.folder=["d/self"]' run.max_tokens=4096 optim.lr=1e-4 \\
        data.held_out=256 method.groups=2 method.token.steps=5 --out direction.json

After ``--drift`` steps of the token loss, the gradients of several losses are averaged over ``--batches`` batches: the
token loss, GTO's term, the same with advantages permuted within their groups, with other rewards and without the
reference, and `reach`. The head then takes a step along the negative gradient and one against it, scaled as Adam scales
it, of the same length for all losses: ``--lengths`` times what the drift moved. The trees of all these heads are
compared at the same positions, of texts that the gradients saw and of held-out texts. A loss that works raises its
reward along, and lowers it against. If both change it equally, the direction is noise.

Settings are those of ``draftwood train head --method gto``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from draftwood.cli.console.terminal import Screen
from draftwood.disk.files import write_json
from draftwood.errors import OptionError
from draftwood.train.base import Batch, Example
from draftwood.train.config import load_config
from draftwood.train.loop.distributed import Processes
from draftwood.train.loop.setup import Setup, make_signal_source, prepare
from draftwood.train.loop.trainer import Stream, Trainer
from draftwood.train.methods.added import AddedMethod
from draftwood.train.methods.gto import GtoMethod, GtoOptions, copy_frozen
from draftwood.train.methods.reach import ReachMethod, ReachOptions
from draftwood.train.trees.draft_trees import DraftTrees
from draftwood.train.trees.head_run import DraftHead
from draftwood.train.trees.rewards import REWARDS
from draftwood.train.trees.verify import VerifiedTree
from gto_controls import Permuted
from gto_reward import FIGURES, Measured, batches, groups, of_batch, over_reference
from outcome import exit_code

SHOWN = ("reward", "accepted")  # of FIGURES
SIGNS = {"along": 1.0, "against": -1.0}


class Recorded(GtoMethod):
    """Keeps its last trees."""

    last: list[tuple[VerifiedTree, DraftTrees]]

    def verified_trees(self, *batch: Any) -> list[tuple[VerifiedTree, DraftTrees]]:
        self.last = super().verified_trees(*batch)
        return self.last


class Variant(GtoMethod):
    """Has the trees of another method, and rewards of its own."""

    twin: Recorded

    def verified_trees(self, *batch: Any) -> list[tuple[VerifiedTree, DraftTrees]]:
        return self.twin.last


class PermutedVariant(Permuted, Variant):
    pass


class Direction(NamedTuple):
    """What a loss would change."""

    name: str
    gradient: list[Tensor]  # averaged over batches


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="as for draftwood train head")
    parser.add_argument("--batches", type=int, default=150, help="number of batches to average over (default: 150)")
    parser.add_argument("--drift", type=int, default=50, help="steps of the token loss first (default: 50)")
    parser.add_argument("--texts", type=int, default=128, help="texts to compare trees on (default: 128)")
    parser.add_argument("--lengths", type=float, nargs="+", default=[0.3, 1.0], help="(default: 0.3 1)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures to a JSON file")
    args = parser.parse_args(arguments)
    if min(args.batches, args.drift, args.texts) < 1 or min(args.lengths) <= 0:
        raise OptionError("--batches, --drift and --texts must be 1 or more, --lengths above 0")
    return args


def make_methods(method: GtoMethod, seed: int) -> dict[str, AddedMethod]:
    """All methods share the head; their references are the head as it is now."""
    head, frozen, options = method.head, method.frozen, method.options
    own = Recorded(options, head, frozen, seed)
    variants = {  # in small: the paper's Tables 3 and 5
        "gto, permuted": PermutedVariant(options, head, frozen, seed),
        **{f"gto, {kind}": Variant(replace(options, reward=kind), head, frozen, seed) for kind in REWARDS[1:]},
        "gto, no reference": Variant(replace(options, debias=False), head, frozen, seed),
    }
    for variant in variants.values():
        variant.twin = own
    shared = {name: getattr(options, name) for name in ("width", "nodes", "depth", "token_loss", "token")}
    reach = ReachOptions(**shared, roots=options.groups * options.group_size)
    return {"gto": own, **variants, "reach": ReachMethod(reach, head, frozen, seed)}


def average_gradients(
    args: argparse.Namespace, trainer: Trainer, stream: Stream, source: Any, methods: dict[str, AddedMethod], show: Any
) -> tuple[list[Direction], list[Example]]:
    """Return the directions and the texts that they come from."""
    parameters = [parameter for parameter in trainer.head.parameters() if parameter.requires_grad]
    sums = {name: [torch.zeros_like(each) for each in parameters] for name in ("token loss", *methods)}
    seen: list[Example] = []
    trainer.head.train()
    for index in range(args.batches):
        show("gradients of batches", index, args.batches)
        _, examples = stream.take()
        seen += examples
        batch = Batch.of(examples, trainer.device)
        signals = source.signals(batch)
        for name, total in sums.items():
            method = methods.get(name)
            with trainer.autocast():
                if method is None:
                    trainer.method.begin_step(args.drift + index, 0)
                    loss: Tensor | None = trainer.method.losses(batch, signals).total
                else:
                    method.begin_step(args.drift + index, 0)
                    loss = method.tree_loss(batch, signals)[0]
            if loss is None or not loss.requires_grad:
                continue
            for place, gradient in zip(total, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
                if gradient is not None:
                    place += gradient / args.batches
    return [Direction(name, total) for name, total in sums.items()], seen


def scales(trainer: Trainer) -> list[Tensor]:
    """Return Adam's scale of each parameter's steps after the drift."""
    found = []
    for parameter in trainer.head.parameters():
        if parameter.requires_grad:
            square = trainer.optimizer.state[parameter]["exp_avg_sq"]
            found.append(1.0 / (square.sqrt() + square.mean().sqrt() + 1e-12))
    return found


def moved(head: DraftHead, direction: Direction, scale: Sequence[Tensor], length: float) -> DraftHead:
    """Return a copy of the head after a step of this length; a negative one goes against the direction."""
    step = [-gradient * each for gradient, each in zip(direction.gradient, scale, strict=True)]
    norm = torch.stack([each.square().sum() for each in step]).sum().sqrt().clamp(min=1e-30)
    copy = copy_frozen(head)
    names = [name for name, parameter in head.named_parameters() if parameter.requires_grad]
    own = dict(copy.named_parameters())
    with torch.no_grad():
        for name, each in zip(names, step, strict=True):
            own[name] += each * (length / norm)
    return copy


def compare(
    heads: Sequence[DraftHead], setup: Setup, options: GtoOptions, texts: Sequence[Example], trainer: Trainer
) -> Measured:
    parts, numbers, num_texts = [], [], 0
    for examples in batches(texts, trainer.config.run.max_tokens):
        batch = Batch.of(examples, trainer.device)
        rows = groups(batch, options, 0)
        if any(rows):
            with trainer.autocast():
                parts.append(of_batch(heads, setup, options, batch, rows))
            numbers.append(np.repeat(num_texts + np.arange(len(rows)), [len(row) for row in rows]))
        num_texts += len(examples)
    if not parts:
        raise OptionError("No text has room for a group of trees", next_step="Lower method.group_size.")
    return Measured(torch.cat(parts, dim=1).numpy(), np.concatenate(numbers))


def rows_of(found: Measured, names: Sequence[str], where: str, length: float) -> Iterator[dict[str, Any]]:
    """Yield the changes of every direction: along, against, and half their difference. Head 0 is the base."""
    for number, name in enumerate(names):
        along, against = 1 + 2 * number, 2 + 2 * number
        slope = Measured(np.stack([found.figures[against], found.figures[along]]) / 2.0, found.texts)
        row: dict[str, Any] = {"loss": name, "texts": where, "length": length}
        for kind, changes in (
            ("along", over_reference(found, along)),
            ("against", over_reference(found, against)),
            ("slope", over_reference(slope, 1)),
        ):
            row |= {f"{figure} {kind}": list(each) for figure, each in zip(FIGURES, changes, strict=True)}
        yield row


def line(row: dict[str, Any]) -> str:
    cells = [row["loss"], row["texts"], f"{row['length']:g}"]
    for figure in SHOWN:
        cells += [f"{row[f'{figure} {kind}'][0]:+.4f}" for kind in SIGNS]
        value, low, high = row[f"{figure} slope"]
        cells.append(f"{value:+.4f} ({low:+.4f} to {high:+.4f})")
    return f"| {' | '.join(cells)} |"


def measure(args: argparse.Namespace, screen: Screen) -> None:
    config = load_config(None, ["run.out=nowhere", *args.settings, f"optim.steps={args.drift}"], "gto")
    setup = prepare(config, Processes(), screen.progress)
    method = setup.method
    if not isinstance(method, GtoMethod):
        raise OptionError("This is about GTO", got=f"method.name={method.name}", next_step="Leave method.name out.")
    methods = make_methods(method, config.run.seed)
    source = make_signal_source(config, setup, Processes(), screen.progress)
    trainer = Trainer(config, method.token_method, setup.texts, source, args.drift)
    for step in range(args.drift):
        screen.progress("token loss alone", step, args.drift)
        trainer.step()
    head = cast(DraftHead, method.head)
    with torch.no_grad():
        pairs = zip(head.parameters(), method.reference.parameters(), strict=True)
        drifted = float(torch.stack([(a - b).square().sum() for a, b in pairs]).sum().sqrt())
    stream = Stream(setup.texts, config.run.max_tokens, config.run.seed, Processes(), trainer.progress.place)
    directions, seen = average_gradients(args, trainer, stream, source, methods, screen.progress)
    scale = scales(trainer)
    held_out = setup.held_out.shuffled(config.run.seed)[: args.texts]
    samples = {"in sample": seen[:: max(1, len(seen) // args.texts)][: args.texts], "held out": held_out}
    screen.progress.clear()
    print(f"the drift moved the head by {drifted:.4g}; {args.batches} batches, {args.texts} texts to compare on\n")
    headings = [f"{figure} {kind}" for figure in SHOWN for kind in (*SIGNS, "half the difference (95%)")]
    print(f"| loss | texts | length | {' | '.join(headings)} |")
    print("| --- " * (3 + len(headings)) + "|", flush=True)
    found: list[dict[str, Any]] = []
    for length in args.lengths:
        steps = [length * drifted * sign for sign in SIGNS.values()]
        heads = [copy_frozen(head), *(moved(head, each, scale, step) for each in directions for step in steps)]
        for where, texts in samples.items():
            measured = compare(heads, setup, method.options, texts, trainer)
            for row in rows_of(measured, [each.name for each in directions], where, length):
                print(line(row), flush=True)
                found.append(row)
            if args.out:
                write_json(args.out, {"drift": drifted, "rows": found})


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: measure(parsed(arguments), Screen("auto")))


if __name__ == "__main__":
    sys.exit(main())
