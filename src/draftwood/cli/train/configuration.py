"""``draftwood train config``: print a configuration file with every key, its default and its meaning."""

from __future__ import annotations

import argparse
from pathlib import Path

from draftwood.disk import check_output, new_file
from draftwood.train.loop import write_template


def run(args: argparse.Namespace) -> int:
    text = write_template(args.method)
    if args.out is None:
        print(text, end="")
        return 0
    path = Path(args.out)
    check_output(path, force=False)
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(path)
    return 0


def describe_keys() -> str:
    """The keys of a configuration, for the help of ``train head``."""
    return "configuration keys, see also: draftwood train config --method NAME\n\n" + write_template()
