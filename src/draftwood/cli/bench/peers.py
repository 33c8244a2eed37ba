"""``draftwood bench peers``: other engines, whether they are there, and how to get them."""

from __future__ import annotations

import argparse
from typing import Any

from draftwood.cli.bench.tables import prose_table
from draftwood.cli.console import Screen, Subparsers, add_command, show


def register(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "peers",
        run,
        "List other engines and whether they are there, or install one",
        "draftwood bench peers",
        "draftwood bench peers --install llamacpp",
        "draftwood bench --peers transformers:lookup,tokens=10 --limit 2",
        details="Each runs in a Python of its own: one that --install makes, one that DRAFTWOOD_PEER_ENGINE names\n"
        "(DRAFTWOOD_PEER_VLLM=/path/to/python), or this one if it has the engine.",
    )
    parser.add_argument("--install", metavar="ENGINE", help="make an environment of its own for it")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    from draftwood.bench.peers import PEERS, explain_absence, install_peer

    screen = Screen(args.color)
    if args.install:
        place = install_peer(args.install, screen.progress)
        screen.note(f"{args.install} is in {place}")
    states = {name: explain_absence(spec) or "there" for name, spec in PEERS.items()}
    return show(args, {"peers": states}, prose_table(screen.out, [*states.items()]))
