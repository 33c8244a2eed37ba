"""``draftwood inspect tree``: draw the draft trees of a run."""

import argparse
import json
from itertools import islice

from draftwood.cli.console import BOLD, Screen, legend, load_llm, read_prompt, run_info
from draftwood.cli.inspect.tree import as_dict, format_heading, tree_lines
from draftwood.cli.options import sampling_params
from draftwood.errors import OptionError
from draftwood.prompts import prompt_ids


def run(args: argparse.Namespace) -> int:
    if args.cycles < 1 or args.skip < 0:
        raise OptionError("No cycles to show", got=f"--cycles {args.cycles} --skip {args.skip}")
    params = sampling_params(args)
    prompt = read_prompt(args.prompt, args.file)
    screen = Screen(args.color)
    with load_llm(args, screen) as llm:
        ids = prompt_ids(llm.tokenizer, prompt, raw=args.raw, system=args.system)
        events = islice(enumerate(llm.stream(ids, params), start=1), args.skip, args.skip + args.cycles)
        if args.json:
            cycles = [as_dict(cycle, event, llm.tokenizer) for cycle, event in events]
            print(json.dumps({**run_info(args, llm), "cycles": cycles}))
            return 0
        sources: list[str] = []
        for cycle, event in events:
            sources += event.sources
            print(screen.out(format_heading(cycle, event), BOLD))
            print("\n".join(tree_lines(event, llm.tokenizer, screen.out)), end="\n\n")
        if not sources:
            screen.note(f"The output ended within the first {args.skip} cycles.")
        elif screen.out.enabled:
            print(legend(screen.out, sources))
    return 0
