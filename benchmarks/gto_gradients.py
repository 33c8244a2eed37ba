"""Measures how similar the gradients of GTO and of the token loss are between batches.

    python benchmarks/gto_gradients.py head.start=HEAD 'data.folder=["d/self"]' run.max_tokens=2048 optim.lr=1e-4

Only the common part of the gradients adds up over training steps; the rest is noise. The mean cosine of two batches is
the share of the common part in the squared norm. At the start the head equals its reference and GTO has no signal,
so ``--drift`` steps of the token loss come first. The arguments are those of ``draftwood train head --method gto``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import combinations
from statistics import mean, stdev

import torch

from draftwood.cli.console.terminal import Screen
from draftwood.errors import OptionError
from draftwood.train.base import Batch
from draftwood.train.config import load_config
from draftwood.train.loop.distributed import Processes
from draftwood.train.loop.setup import make_signal_source, prepare
from draftwood.train.loop.trainer import Stream, Trainer
from draftwood.train.methods.gto import GtoMethod
from outcome import exit_code


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="as for draftwood train head")
    parser.add_argument("--batches", type=int, default=14, help="number of batches to compare (default: 14)")
    parser.add_argument("--drift", type=int, default=24, help="steps of the token loss first (default: 24)")
    args = parser.parse_args(arguments)
    if args.batches < 3 or args.drift < 1:
        raise OptionError("--batches must be 3 or more, --drift 1 or more", got=f"{args.batches}, {args.drift}")
    return args


def flat_gradient(loss: torch.Tensor, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """[P]"""
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(parameter) if gradient is None else gradient).flatten().float().cpu()
            for gradient, parameter in zip(found, parameters, strict=True)
        ]
    )


def summary(gradients: list[torch.Tensor]) -> tuple[float, float, float]:
    """Mean norm, then mean and deviation of the pairwise cosines."""
    cosines = [float(torch.cosine_similarity(a, b, dim=0)) for a, b in combinations(gradients, 2)]
    return mean(float(gradient.norm()) for gradient in gradients), mean(cosines), stdev(cosines)


def measure(args: argparse.Namespace, screen: Screen) -> dict[str, list[torch.Tensor]]:
    config = load_config(None, ["run.out=nowhere", *args.settings, f"optim.steps={args.drift}"], "gto")
    setup = prepare(config, Processes(), screen.progress)
    method = setup.method
    if not isinstance(method, GtoMethod):
        raise OptionError("This is about GTO", got=f"method.name={method.name}", next_step="Leave method.name out.")
    source = make_signal_source(config, setup, Processes(), screen.progress)
    trainer = Trainer(config, method.token_method, setup.texts, source, args.drift)
    for step in range(args.drift):
        screen.progress("token loss alone", step, args.drift)
        trainer.step()
    method.head.train()
    stream = Stream(setup.texts, config.run.max_tokens, config.run.seed, Processes(), trainer.progress.place)
    parameters = [parameter for parameter in method.head.parameters() if parameter.requires_grad]
    token: list[torch.Tensor] = []
    tree: list[torch.Tensor] = []
    for index in range(args.batches):
        screen.progress("gradients of batches", index, args.batches)
        _, examples = stream.take()
        batch = Batch.of(examples, trainer.device)
        method.begin_step(args.drift + index, args.drift + args.batches)
        with trainer.autocast():
            terms = method.terms(batch, source.signals(batch))
        token.append(flat_gradient(terms.token.total, parameters))
        if terms.tree is not None and terms.tree.requires_grad:  # otherwise no tree had an accepted token
            tree.append(flat_gradient(terms.tree, parameters))
    screen.progress.clear()
    if len(tree) < 3:
        raise OptionError(
            "Too few batches have trees of which something is accepted",
            got=f"{len(tree)} of {args.batches}",
            next_step="Raise run.max_tokens or --batches, or lower method.group_size.",
        )
    return {"token loss": token, "GTO's term": tree}


def show(arguments: Sequence[str] | None) -> None:
    found = measure(parsed(arguments), Screen("auto"))
    print("| | batches | mean norm | mean pairwise cosine | deviation |")
    print("| --- | --- | --- | --- | --- |")
    for name, gradients in found.items():
        length, cosine, deviation = summary(gradients)
        print(f"| {name} | {len(gradients)} | {length:.3g} | {cosine:.4f} | {deviation:.4f} |")


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: show(arguments))


if __name__ == "__main__":
    sys.exit(main())
