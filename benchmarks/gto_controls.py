"""Trains a head with GTO's term made useless or harmful, to tell its effect from noise.

    python benchmarks/gto_controls.py permuted head.start=HEAD 'data.folder=["d/self"]' optim.steps=200 run.out=permuted

permuted  the advantages of each group are in random order
negated   the advantages have the opposite sign

Settings are those of ``draftwood train head --method gto``. If all three do equally well, the term is noise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from draftwood.train.config import load_config
from draftwood.train.loop.run import train_head
from draftwood.train.methods import METHODS
from draftwood.train.methods.gto import GtoMethod, Verdicts
from outcome import exit_code


class Permuted(GtoMethod):
    """Advantages in random order within each group."""

    name = "gto_permuted"

    def advantages(self, verdicts: Verdicts) -> Tensor:
        given = super().advantages(verdicts)
        in_groups = given.view(len(given), -1, self.options.group_size)
        order = torch.rand(in_groups.shape, generator=torch.Generator().manual_seed(self.step)).argsort(dim=-1)
        return in_groups.gather(-1, order.to(given.device)).view_as(given)


class Negated(GtoMethod):
    """Advantages of the opposite sign."""

    name = "gto_negated"

    def advantages(self, verdicts: Verdicts) -> Tensor:
        return -super().advantages(verdicts)


CONTROLS = {"permuted": Permuted, "negated": Negated}


@contextmanager
def registered() -> Iterator[None]:
    """Make the controls training methods, by their names."""
    METHODS.update({each.name: f"{each.__module__}:{each.__name__}" for each in CONTROLS.values()})
    try:
        yield
    finally:
        for each in CONTROLS.values():
            del METHODS[each.name]


def train(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("control", choices=CONTROLS)
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="as for draftwood train head")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in run.out")
    args = parser.parse_intermixed_args(arguments)
    with registered():
        train_head(load_config(None, args.settings, CONTROLS[args.control].name), resume=args.resume)


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: train(arguments))


if __name__ == "__main__":
    sys.exit(main())
