"""``draftwood chat``: a conversation in the terminal."""

import argparse
import sys

from draftwood.cli.console import BOLD, Screen, budget_text, join_lines, load_llm, piped_lines, typed_lines
from draftwood.cli.generation.conversation import HINT, Conversation
from draftwood.cli.options import sampling_params
from draftwood.errors import CapabilityError

PROMPT = "> "
CONTEXTS = 3  # in the KV cache during a turn: the previous turn, its extended copy, freed space of an earlier turn


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    screen = Screen(args.color, quiet=args.quiet)
    interactive = sys.stdin.isatty() and screen.out.is_terminal
    with load_llm(args, screen, max_batch=CONTEXTS) as llm:
        if not llm.tokenizer.has_chat:
            raise CapabilityError(
                "This model has no chat template",
                got=llm.info.name,
                next_step="Use draftwood generate, or a chat model.",
            )
        conversation = Conversation(
            llm, params, screen, args.system, budget_text(args), interactive=interactive, all_stats=args.stats
        )
        if interactive:
            screen.note(f"{llm.info.name}, drafter {llm.drafter}. {HINT}")
        typed = typed_lines(PROMPT, BOLD if screen.out.enabled else "")
        for line in join_lines(typed if interactive else piped_lines()):
            if not conversation.handle(line.strip()):
                break
    return 0
