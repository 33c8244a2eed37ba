"""Command-line arguments of a training run, for `draftwood train head` and `python -m draftwood.train`."""

import argparse

NAMES = ("eagle", "hass", "eagle3", "griffin", "talf", "gto", "reach", "medusa", "hydra")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "changes", nargs="*", metavar="SECTION.KEY=VALUE", help="configuration overrides, for example optim.lr=3e-5"
    )
    parser.add_argument("--method", choices=NAMES, default="", help="training method (same as method.name)")
    parser.add_argument("--config", metavar="FILE", help="configuration, a TOML file")
    parser.add_argument("--plan", action="store_true", help="print what would run, its memory and time, and exit")
    parser.add_argument(
        "--time",
        action=argparse.BooleanOptionalAction,
        help="with --plan: load the model and time a few steps (default: yes)",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in run.out")
