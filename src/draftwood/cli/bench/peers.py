"""``draftwood bench peers``: lists other engines and installs them."""

import argparse

from draftwood.bench.peers import PEERS, explain_absence, install_peer
from draftwood.cli.bench.tables import prose_table
from draftwood.cli.console import Screen, show


def run(args: argparse.Namespace) -> int:
    screen = Screen(args.color)
    if args.install:
        place = install_peer(args.install, screen.progress)
        screen.note(f"installed {args.install}: {place}")
    states = {name: explain_absence(spec) or "installed" for name, spec in PEERS.items()}
    return show(args, {"peers": states}, prose_table(screen.out, [*states.items()]))
