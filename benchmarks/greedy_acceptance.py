"""Measures what a head's probabilities mean for greedy decoding: how often its guess of a rank is the target's choice.

    python benchmarks/greedy_acceptance.py head.start=smollm2-eagle3 'data.folder=["d/greedy"]' data.max_length=512

The texts are greedy answers of the target, on prompts that the head was not trained on. At every second position the
head follows the text for ``--depth`` tokens with its own features, as in a tree whose accepted path is the text. Its
top ten probabilities are compared with the text's next token, as they are and sharpened (`sharpen` of the drafters).
The first table has the log-loss by depth and temperature, the second the acceptance by probability and rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from draftwood.cli.console.terminal import Screen
from draftwood.drafters.neural_options import sharpen_probs
from draftwood.errors import OptionError
from draftwood.train.base import Batch
from draftwood.train.config import load_config
from draftwood.train.loop.setup import Setup, prepare
from draftwood.train.methods.reach import follow_text
from draftwood.train.trees.head_run import DraftHead, HeadRun
from draftwood.train.trees.roots import counted_roots, padded
from outcome import exit_code

TOP = 10
TEMPERATURES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
EDGES = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95, 1.01)  # of probabilities
RANKS = (1, 2, 3)
MIN_COUNT = 30  # fewer guesses give no figure


class Guesses(NamedTuple):
    """Top guesses at many nodes."""

    probs: npt.NDArray[np.float32]  # [n, k]
    ranks: npt.NDArray[np.int64]  # [n] which of them is right, from 0; k if none


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="as for draftwood train head")
    parser.add_argument("--depth", type=int, default=7, help="tokens to follow the text (default: 7)")
    parser.add_argument("--texts", type=int, default=128, help="maximum number of texts (default: 128)")
    args = parser.parse_args(arguments)
    if args.depth < 1 or args.texts < 1:
        raise OptionError("--depth and --texts must be 1 or more", got=f"{args.depth}, {args.texts}")
    return args


@torch.no_grad()
def follow(head: DraftHead, setup: Setup, batch: Batch, depth: int) -> Iterator[Guesses]:
    """Yield the guesses at every depth, from the roots on."""
    roots, is_root = padded([own[::2] for own in counted_roots(batch)], 1, batch.token_ids.device)  # [B, R]
    written = follow_text(head, batch, roots, depth)
    run = HeadRun(head, batch, setup.frozen.signals(batch), roots)
    hidden, parents = run.at_roots(), torch.zeros_like(roots)[..., None]
    for level in range(depth):
        if level:
            hidden = run.step(written.tokens[..., level - 1 : level], parents)
        best = head.logits(hidden[:, :, 0]).float().log_softmax(-1).topk(TOP)
        places = roots + level + 1
        counts = is_root & (written.length >= level) & (places < batch.lengths[:, None])
        token = torch.take_along_dim(batch.token_ids, places.clamp(max=batch.token_ids.shape[1] - 1), 1)
        right = head.target_ids(best.indices) == token[..., None]
        rank = torch.where(right.any(-1), right.int().argmax(-1), TOP)
        yield Guesses(best.values.exp()[counts].cpu().numpy(), rank[counts].cpu().numpy())


def log_loss(guesses: Guesses, temperature: float) -> float:
    """Return the mean log-loss of the right guess; one class stands for all others."""
    probs = sharpen_probs(guesses.probs, temperature)
    rest = np.maximum(1.0 - probs.sum(axis=1, keepdims=True), 1e-4)
    own = np.concatenate([probs, rest], axis=1)[np.arange(len(probs)), guesses.ranks]
    return float(-np.log(np.maximum(own, 1e-6)).mean())


def lines(levels: Sequence[Guesses]) -> Iterator[str]:
    yield "| depth | nodes | best guess right | its probability | " + " | ".join(f"{t:g}" for t in TEMPERATURES) + " |"
    yield "| --- " * (4 + len(TEMPERATURES)) + "|"
    for depth, level in enumerate(levels, start=1):
        losses = " | ".join(f"{log_loss(level, t):.3f}" for t in TEMPERATURES)
        right, said = (level.ranks == 0).mean(), level.probs[:, 0].mean()
        yield f"| {depth} | {len(level.ranks)} | {right:.3f} | {said:.3f} | {losses} |"
    together = Guesses(*(np.concatenate(parts) for parts in zip(*levels, strict=True)))
    ranges = [f"{low:g} to {min(high, 1):g}" for low, high in pairwise(EDGES)]
    yield "\n| temperature, rank: mean probability / share right | " + " | ".join(ranges) + " |"
    yield "| --- " * (1 + len(ranges)) + "|"
    for temperature in (1.0, 0.7):
        probs = sharpen_probs(together.probs, temperature)
        for rank in RANKS:
            own = probs[:, rank - 1]
            bins = np.digitize(own, EDGES) - 1
            cells = []
            for number in range(len(ranges)):
                here = bins == number
                share = (together.ranks[here] == rank - 1).mean() if here.sum() >= MIN_COUNT else None
                cells.append("" if share is None else f"{own[here].mean():.2f} / {share:.2f}")
            yield f"| {temperature:g}, {rank} | " + " | ".join(cells) + " |"


def measure(args: argparse.Namespace, screen: Screen) -> None:
    always = ["run.out=nowhere", "optim.steps=1", "data.held_out=0"]
    config = load_config(None, [*always, *args.settings], "reach")
    setup = prepare(config, progress=screen.progress)
    head = cast(DraftHead, setup.head.eval())
    texts = setup.texts.shuffled(config.run.seed)[: args.texts]
    parts: list[list[Guesses]] = [[] for _ in range(args.depth)]
    for done, text in enumerate(texts):
        screen.progress("following texts", done, len(texts))
        batch = Batch.of([text], setup.target.info.device)
        for level, found in zip(parts, follow(head, setup, batch, args.depth), strict=True):
            level.append(found)
    screen.progress.clear()
    levels = [Guesses(*(np.concatenate(each) for each in zip(*level, strict=True))) for level in parts]
    print("\n".join(lines(levels)))


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: measure(parsed(arguments), Screen("auto")))


if __name__ == "__main__":
    sys.exit(main())
