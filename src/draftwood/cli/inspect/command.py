"""``draftwood inspect``: look inside a run, or a draft head."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from typing import Any

from draftwood.cli.console import (
    BOLD,
    Screen,
    Subparsers,
    add_command,
    add_group,
    add_prompt_options,
    add_run_options,
    facts,
    legend,
    load_llm,
    read_prompt,
    sampling_params,
)
from draftwood.cli.inspect import head, theory
from draftwood.cli.inspect.tree import as_dict, heading, tree_lines
from draftwood.errors import OptionError

_EXAMPLES = (
    "draftwood inspect tree 'Say one two three, one two three.'",
    "draftwood inspect tree --skip 10 --cycles 5 'Explain recursion.'",
    "draftwood inspect tree --json --cycles 1 'Hello'",
)
_DETAILS = """\
One node a line: its token, who suggested it, how likely the drafter thought it, and a tick where
the target agreed. An only child stands under its parent, siblings branch off. The last line is the
token that the target added itself."""


def register(commands: Subparsers[Any]) -> None:
    lines = (*_EXAMPLES[:2], theory.EXAMPLES[0], head.EXAMPLES[0])
    views = add_group(commands, "inspect", "Look inside a run or a draft head", *lines)
    tree = add_command(views, "tree", run, "Draw the draft trees of some cycles", *_EXAMPLES, details=_DETAILS)
    add_prompt_options(tree)
    tree.add_argument("--cycles", type=int, default=3, metavar="N", help="cycles to show (default: 3)")
    tree.add_argument("--skip", type=int, default=0, metavar="K", help="cycles to pass over first (default: 0)")
    tree.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_run_options(tree)
    theory.register(views)
    head.register(views)


def run(args: argparse.Namespace) -> int:
    if args.cycles < 1 or args.skip < 0:
        raise OptionError("There is nothing to show", got=f"--cycles {args.cycles} --skip {args.skip}")
    params = sampling_params(args)
    prompt = read_prompt(args.prompt, args.file)
    screen = Screen(args.color)
    with load_llm(args, screen) as llm:
        from draftwood.prompts import prompt_ids

        ids = prompt_ids(llm.tokenizer, prompt, raw=args.raw)
        events = islice(enumerate(llm.stream(ids, params), start=1), args.skip, args.skip + args.cycles)
        if args.json:
            cycles = [as_dict(cycle, event, llm.tokenizer) for cycle, event in events]
            print(json.dumps({**facts(llm), "cycles": cycles}))
            return 0
        sources: list[str] = []
        for cycle, event in events:
            sources += event.sources
            print(screen.out(heading(cycle, event), BOLD))
            print("\n".join(tree_lines(event, llm.tokenizer, screen.out)), end="\n\n")
        if not sources:
            screen.note(f"The output ended within the first {args.skip} cycles.")
        elif screen.out.enabled:
            print(legend(screen.out, sources))
    return 0
