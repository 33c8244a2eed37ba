"""``draftwood bench peers``: lists other engines and installs them."""

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
        "List other engines and whether they are installed, or install one",
        "draftwood bench peers",
        "draftwood bench peers --install llamacpp",
        "draftwood bench --peers transformers:lookup,tokens=10 --limit 2",
        details="Each runs in its own Python: one created by --install, one set by DRAFTWOOD_PEER_ENGINE\n"
        "(DRAFTWOOD_PEER_VLLM=/path/to/python), or the current one if it has the engine.",
    )
    parser.add_argument("--install", metavar="ENGINE", help="install this engine into its own environment")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from draftwood.bench.peers import PEERS, explain_absence, install_peer

    screen = Screen(args.color)
    if args.install:
        place = install_peer(args.install, screen.progress)
        screen.note(f"installed {args.install}: {place}")
    states = {name: explain_absence(spec) or "installed" for name, spec in PEERS.items()}
    return show(args, {"peers": states}, prose_table(screen.out, [*states.items()]))
