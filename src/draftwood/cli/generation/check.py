"""``draftwood check``: compare speculative with plain greedy decoding."""

import argparse
import json
from dataclasses import asdict

from draftwood.check import CheckRecord, CheckSummary, Difference, check
from draftwood.cli.console import BOLD, GREEN, RED, SEPARATOR, Screen, dtype_name, load_llm, pluralize, quote, run_info
from draftwood.cli.options import sampling_params
from draftwood.llm import LLM
from draftwood.prompts import prompt_ids, read_prompts


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    prompts = read_prompts(args.prompts, args.limit)
    screen = Screen(args.color)
    records: list[CheckRecord] = []
    with load_llm(args, screen) as llm:
        ids = [prompt_ids(llm.tokenizer, prompt, raw=args.raw) for prompt in prompts]
        screen.progress("checking", 0, len(ids))
        for record in check(llm, ids, params):
            records.append(record)
            if record.difference is not None and not args.json:
                screen.progress.clear()
                print(_difference_line(screen, llm, record.index, record.verdict, record.difference))
            screen.progress("checking", len(records), len(ids))
        summary = CheckSummary.of(records)
        if args.json:
            results = [record.as_dict() for record in records]
            print(json.dumps({**run_info(args, llm), "summary": asdict(summary), "records": results}))
        else:
            print(_summary_line(screen, summary, dtype_name(llm.info)))
    return 1 if summary.errors else 0


def _difference_line(screen: Screen, llm: LLM, index: int, verdict: str, difference: Difference) -> str:
    def token(token_id: int | None) -> str:
        return "end of output" if token_id is None else f"{quote(llm.tokenizer.token_text(token_id))} ({token_id})"

    label = "numeric tie" if verdict == "tie" else screen.out("ERROR", BOLD, RED)
    gap = "no gap" if difference.gap is None else f"gap {difference.gap:.3g}, tolerance {difference.tolerance:g}"
    pair = f"{token(difference.speculative_id)} instead of {token(difference.plain_id)}"
    return f"prompt {index + 1}, token {difference.position}: {pair}: {label} ({gap})"


def _summary_line(screen: Screen, summary: CheckSummary, dtype: str) -> str:
    errors = pluralize(summary.errors, "error")
    parts = [
        f"{pluralize(summary.prompts, 'prompt')}, {pluralize(summary.positions, 'position')} in {dtype}",
        f"{summary.identical} identical",
        pluralize(summary.ties, "numeric tie"),
        screen.out(errors, BOLD, RED) if summary.errors else screen.out(errors, GREEN),
        f"tau {summary.acceptance_length:.2f}",
    ]
    return SEPARATOR.join(parts)
