"""Evaluates draft trees of heads by GTO's reward on held-out texts, and the components of the reward.

    python benchmarks/gto_reward.py runs/gto/head runs/more/head head.start=smollm2-eagle3 'data.folder=["d/self"]' \\
        data.held_out=256 data.max_length=768 run.max_tokens=16384 method.groups=4

The reward of a tree is a smooth maximum over its branches of their expected accepted length. It rises with the best
branch and with the number of branches: for a tree without any acceptance it is the logarithm of the number of leaves.
The table also shows what greedy decoding accepts. Below it: correlation of the gain in reward over the reference with
the gains in its components, over all trees.

``head.start`` is the reference, as in training; all heads draft at the same positions of the same texts. Further
settings are those of ``draftwood train head --method gto``. With data.folder, data.held_out, data.max_length and
run.seed of the heads' training runs, the texts are those that were held out in training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from draftwood.bench.figures.bootstrap import cluster_table, interval, quotient, resample_sums
from draftwood.bench.figures.summary import Interval
from draftwood.cli.console.terminal import Screen
from draftwood.disk.files import write_json
from draftwood.disk.toml import read_toml
from draftwood.errors import OptionError
from draftwood.heads import find_head
from draftwood.heads.fit import load_head_for
from draftwood.train.base import Batch, Example
from draftwood.train.config import CONFIGURATION, TrainConfig, load_config
from draftwood.train.loop.setup import Setup, prepare
from draftwood.train.loop.trainer import choose_dtype
from draftwood.train.methods.gto import GtoMethod, GtoOptions
from draftwood.train.trees.draft_trees import DraftBeam, grow_draft_trees
from draftwood.train.trees.head_run import DraftHead, HeadRun
from draftwood.train.trees.rewards import accepted_branch, is_leaf, reward
from draftwood.train.trees.roots import counted_roots, padded, sample_groups, texts_of
from draftwood.train.trees.verify import verify_trees
from outcome import exit_code

FIGURES = ("reward", "best branch", "log leaves", "accepted")
STEP = 0  # training step, which determines the positions

Array = npt.NDArray[np.float64]


class Measured(NamedTuple):
    figures: Array  # [H, trees, 4] by head, the reference first
    texts: npt.NDArray[np.int64]  # [trees] text of each tree


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = "folders or names of heads, and settings as for draftwood train head"
    parser.add_argument("words", nargs="*", metavar="HEAD or section.key=value", help=about)
    parser.add_argument("--texts", type=int, default=256, help="maximum number of texts (default: 256)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures to a JSON file")
    args = parser.parse_intermixed_args(arguments)
    args.settings = [word for word in args.words if "=" in word]
    args.heads = [word for word in args.words if "=" not in word]
    if args.texts < 1:
        raise OptionError("--texts must be 1 or more", got=args.texts)
    return args


def batches(texts: Sequence[Example], max_tokens: int) -> list[list[Example]]:
    """Batch texts of similar length, by tokens including padding."""
    found: list[list[Example]] = []
    for text in sorted(texts, key=lambda text: len(text.token_ids)):
        if not found or len(text.token_ids) * (len(found[-1]) + 1) > max_tokens:
            found.append([])
        found[-1].append(text)
    return found


def groups(batch: Batch, options: GtoOptions, seed: int) -> list[list[int]]:
    """Choose the positions of each text at which trees are drafted."""
    return [
        sample_groups(roots, options.groups, options.group_size, text, seed, STEP)
        for text, roots in zip(texts_of(batch), counted_roots(batch), strict=True)
    ]


@torch.no_grad()
def of_batch(
    heads: Sequence[DraftHead], setup: Setup, options: GtoOptions, batch: Batch, rows: list[list[int]]
) -> torch.Tensor:
    """[H, trees, 4]"""
    signals = setup.frozen.signals(batch)
    roots, is_root = padded(rows, 1, batch.token_ids.device)  # [B, R]
    beam = DraftBeam(options.width, options.nodes, options.depth)
    trees = [grow_draft_trees(head, HeadRun(head, batch, signals, roots), beam) for head in heads]
    verified = verify_trees(setup.target, texts_of(batch), rows, trees)
    found = []
    for said, tree in zip(verified, trees, strict=True):
        figures = (  # as FIGURES, [B, R] each
            reward(said.probs, tree, options.reward, options.eta),
            reward(said.probs, tree, "max", options.eta),
            is_leaf(tree).sum(-1).log(),
            accepted_branch(said.choices, tree).length,
        )
        found.append(torch.stack([figure[is_root].double() for figure in figures], dim=-1))
    return torch.stack(found).cpu()


def fitting_head(name: str, setup: Setup) -> DraftHead:
    """Raise if a head reads other hidden states than the reference: they are computed once for all."""
    head, config, _ = load_head_for(find_head(name), setup.target, torch.float32)
    num_layers, reference = setup.target.info.num_layers, setup.head.config
    reads, wanted = ((each.kind, each.taps_for(num_layers)) for each in (config, reference))
    if reads != wanted:
        raise OptionError(f"{name} reads other hidden states than head.start does", got=reads, allowed=repr(wanted))
    head.bind(setup.frozen.parts)
    return cast(DraftHead, head.eval().requires_grad_(False))


def measure(args: argparse.Namespace, config: TrainConfig, screen: Screen) -> Measured:
    setup = prepare(config, progress=screen.progress)
    if not isinstance(setup.method, GtoMethod):
        raise OptionError("This is about GTO", got=config.method.name, next_step="Leave method.name out.")
    device, options = setup.target.info.device, setup.method.options
    heads = [setup.method.reference, *(fitting_head(name, setup) for name in args.heads)]
    half = choose_dtype(config.run.dtype, device) != torch.float32
    parts, numbers, num_texts = [], [], 0
    grouped = batches(setup.held_out.shuffled(config.run.seed)[: args.texts], config.run.max_tokens)
    for done, examples in enumerate(grouped):
        screen.progress("drafting trees", done, len(grouped))
        batch = Batch.of(examples, device)
        rows = groups(batch, options, config.run.seed)
        if any(rows):
            with torch.autocast(device.type, dtype=torch.bfloat16 if half else None, enabled=half):
                parts.append(of_batch(heads, setup, options, batch, rows))
            numbers.append(np.repeat(num_texts + np.arange(len(rows)), [len(row) for row in rows]))
        num_texts += len(examples)
    screen.progress.clear()
    if not parts:
        raise OptionError(
            "No text that was held out has room for a group of trees",
            got=f"data.held_out={config.data.held_out}, {num_texts} texts",
            next_step="Raise data.held_out or data.max_length, or lower method.group_size.",
        )
    return Measured(torch.cat(parts, dim=1).numpy(), np.concatenate(numbers))


def over_reference(found: Measured, head: int) -> list[Interval]:
    """Mean gain of each figure over the reference, with a 95% bootstrap interval over texts."""
    gains = found.figures[head] - found.figures[0]  # [trees, 4]
    table = cluster_table((int(text), (*gain, 1.0)) for text, gain in zip(found.texts, gains.tolist(), strict=True))
    assert table is not None
    sums = resample_sums(table)  # [1 + R, 4 + 1]
    intervals = [interval(quotient(sums[:, k], sums[:, -1])) for k in range(len(FIGURES))]
    return [each for each in intervals if each is not None]


def going_along(found: Measured, head: int) -> dict[str, float]:
    """Correlation of the gain in reward with the gains in its components over all trees; NaN if one is constant."""
    gains = found.figures[head] - found.figures[0]
    with np.errstate(invalid="ignore", divide="ignore"):
        return {name: float(np.corrcoef(gains[:, 0], gains[:, k])[0, 1]) for k, name in enumerate(FIGURES) if k}


def warnings(config: TrainConfig, heads: Sequence[str]) -> Iterator[str]:
    """Warn about heads whose training held out other texts: they may have been trained on these."""
    here = (config.run.seed, config.data.held_out, config.data.max_length, config.data.folders)
    for name in heads:
        path = find_head(name).parent / "config.toml"
        if path.is_file():
            own = TrainConfig.of(read_toml(path, CONFIGURATION))
            if (own.run.seed, own.data.held_out, own.data.max_length, own.data.folders) != here:
                yield f"careful: {name} was trained with other texts held out; it may have learned from these"


def lines(found: Measured, names: Sequence[str]) -> Iterator[str]:
    yield f"{len(np.unique(found.texts))} texts, {len(found.texts)} trees of each head; reference: {names[0]}\n"
    yield "| head | " + " | ".join(f"{name} | over the reference (95%)" for name in FIGURES) + " |"
    yield "| --- " * (1 + 2 * len(FIGURES)) + "|"
    for head, name in enumerate(names):
        cells = []
        for mean, (gain, low, high) in zip(found.figures[head].mean(0), over_reference(found, head), strict=True):
            cells += [f"{mean:.4f}", f"{gain:+.4f} ({low:+.4f} to {high:+.4f})" if head else ""]
        yield f"| {name} | " + " | ".join(cells) + " |"
    for head, name in enumerate(names[1:], start=1):
        gains = found.figures[head, :, 0] - found.figures[0, :, 0]
        along = ", ".join(f"{part} by r={r:.2f}" for part, r in going_along(found, head).items())
        changed = f"{(np.abs(gains) > 1e-6).mean():.0%} of the trees have another reward (deviation {gains.std():.4f})"
        yield f"\n{name}: {changed}; the gain goes with that in {along}"


def content(found: Measured, names: Sequence[str]) -> dict[str, Any]:
    """Convert the results to JSON values."""
    heads = {}
    for head, name in enumerate(names):
        gains = zip(FIGURES, found.figures[head].mean(0).tolist(), over_reference(found, head), strict=True)
        heads[name] = {figure: {"mean": mean, **gain._asdict()} for figure, mean, gain in gains}
    along = {name: going_along(found, head) for head, name in enumerate(names) if head}
    return {"texts": len(np.unique(found.texts)), "trees": len(found.texts), "heads": heads, "along": along}


def show(arguments: Sequence[str] | None) -> None:
    args = parsed(arguments)
    config = load_config(None, ["run.out=nowhere", *args.settings, "optim.steps=1"], "gto")
    for warning in warnings(config, args.heads):
        print(warning, file=sys.stderr)
    found = measure(args, config, Screen("auto"))
    names = [config.head.start, *args.heads]
    print("\n".join(lines(found, names)))
    if args.out:
        write_json(args.out, content(found, names))


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: show(arguments))


if __name__ == "__main__":
    sys.exit(main())
