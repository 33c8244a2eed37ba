"""Compares drafters on the same prompts, in turns: tokens per pass, or tokens per second of CPU time.

    python benchmarks/blend_tables.py --data FOLDER --results runs.jsonl goose@8 blend@8 sam@8 pld@8 recycling@8
    python benchmarks/blend_tables.py --data FOLDER --results speed.jsonl --speed plain goose blend blend@8
    python benchmarks/blend_tables.py --data FOLDER --results runs.jsonl --temperature 0.6 goose@16 stand@16 blend@16

A method is a drafter, with options after a colon (separated by commas) and a budget after ``@``; ``auto`` if there is
none. All methods share one loaded model. A line per answer is appended to the results; answers that are there already
are not computed again, so that a run can be interrupted. Ratios are to the first method, paired by prompt: geometric
means with standard errors. FOLDER has a file TASK.jsonl per task, with ``turns`` and, for tasks named TASK/CATEGORY,
``category`` in each line; ``--skip FOLDER`` leaves out prompts that are in files of the same name there.

At a fixed budget, drafters with a table read the logits of prompts, which takes time; with ``auto`` only where that
pays. So compare the two with ``--whole``, which counts the time to read prompts.

With ``--speed``, ``time.perf_counter`` is replaced by the CPU time of the process before anything else is imported: the
engine measures costs, decides and reports in CPU time. With one thread, other processes disturb it less.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if "--speed" in sys.argv:
    time.perf_counter = time.process_time

import torch

from draftwood import LLM, SamplingParams
from draftwood.cli.options import drafter_options
from draftwood.config import ModelOptions
from draftwood.targets import load_target

TASKS = "humaneval,mbpp,classeval,gsm8k,mt_bench,cnn_dm,qa"
Key = tuple[str, str, int, float]  # method, task, number of the prompt, temperature


class Result(NamedTuple):
    tokens: int
    cycles: int
    positions: int  # of all passes
    seconds: float  # without prefill
    passing: float  # of these in passes of the target
    drafting: float
    accepting: float
    prefill: float = 0.0  # seconds until the prompt was read


def read_prompts(args: argparse.Namespace) -> dict[str, list[str]]:
    found = {}
    for task in args.tasks.split(","):
        name, _, category = task.partition("/")
        known = set(_first_turns(args.skip / f"{name}.jsonl", "")) if args.skip else set()
        turns = _first_turns(args.data / f"{name}.jsonl", category)
        found[task] = [turn for turn in turns if turn not in known][: args.prompts]
    return found


def _first_turns(path: Path, category: str) -> list[str]:
    if not path.exists():
        return []
    items = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [item["turns"][0] for item in items if not category or item.get("category") == category]


def make_llm(method: str, loaded: Any, memory: str) -> LLM:
    spec, _, budget = method.partition("@")
    name, _, options = spec.partition(":")
    chosen = drafter_options(options.split(",") if options else [])
    size = int(budget) if budget else "auto"
    return LLM.from_target(*loaded, drafter=name, drafter_options=chosen, memory=memory, budget=size, max_batch=1)


def answer(llm: LLM, prompt: str, args: argparse.Namespace) -> Result:
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=1, n=args.samples)
    samples = [sample.stats for sample in llm.chat([{"role": "user", "content": prompt}], params)]
    llm.engine.clear()  # the other methods need its cache
    rows = [
        Result(
            stats.output_tokens,
            stats.cycles,
            stats.drafted_nodes + stats.cycles,
            stats.total_seconds - stats.prefill_seconds,
            stats.verify_seconds,
            stats.draft_seconds,
            stats.accept_seconds,
            stats.prefill_seconds,
        )
        for stats in samples
    ]
    return add(rows)


def add(rows: Sequence[Result]) -> Result:
    return Result(*map(sum, zip(*rows, strict=True)))


def read_results(path: Path) -> dict[Key, Result]:
    if not path.exists():
        return {}
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {tuple(key): Result(*values) for key, values in rows}  # type: ignore[misc]


def run(args: argparse.Namespace, prompts: dict[str, list[str]]) -> dict[Key, Result]:
    found = read_results(args.results)
    loaded = load_target(ModelOptions(model=args.model, dtype=args.dtype, max_batch=1))
    llms = {method: make_llm(method, loaded, args.memory) for method in args.methods}
    done, total = 0, sum(map(len, prompts.values()))
    with args.results.open("a", encoding="utf-8") as file:
        for number in range(max(map(len, prompts.values()))):  # all tasks have results early
            for task, own in prompts.items():
                if number >= len(own):
                    continue
                done += 1
                print(f"\r{done}/{total} {task:24}", end="", file=sys.stderr, flush=True)
                for method, llm in llms.items():
                    key = method, task, number, args.temperature
                    if key not in found:
                        found[key] = answer(llm, own[number], args)
                        print(json.dumps((key, found[key])), file=file, flush=True)
    print(file=sys.stderr)
    return found


def geometric(ratios: Sequence[float]) -> str:
    """Geometric mean and its standard error."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / len(logs)
    spread = sum((each - mean) ** 2 for each in logs) / max(len(logs) - 1, 1)
    return f"{math.exp(mean):.3f} ± {math.exp(mean) * math.sqrt(spread / len(logs)):.3f}"


def value_of(result: Result, args: argparse.Namespace) -> float:
    if args.whole:
        return result.tokens / (result.seconds + result.prefill)
    return result.tokens / (result.seconds if args.speed else result.cycles)


def describe(method: str, found: dict[Key, Result], prompts: dict[str, list[str]], args: argparse.Namespace) -> str:
    def results(name: str, task: str) -> list[Result]:
        return [found[name, task, number, args.temperature] for number in range(len(prompts[task]))]

    own = {task: results(method, task) for task in prompts}
    totals = {task: add(rows) for task, rows in own.items()}
    values = [value_of(total, args) for total in totals.values()]
    ratios = [
        value_of(one, args) / value_of(other, args)
        for task in prompts
        for one, other in zip(own[task], results(args.methods[0], task), strict=True)
    ]
    digits = 1 if args.speed else 2
    cells = [method, *(f"{value:.{digits}f}" for value in (*values, sum(values) / len(values))), geometric(ratios)]
    whole = add(list(totals.values()))
    cells += [f"{whole.positions / whole.cycles:.1f}"]
    if args.speed:
        rest = whole.seconds - whole.passing - whole.drafting - whole.accepting
        parts = whole.passing, whole.drafting, whole.accepting, rest
        cells += [f"{whole.tokens / whole.cycles:.2f}", *(f"{1e3 * part / whole.cycles:.2f}" for part in parts)]
    return "| " + " | ".join(cells) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", metavar="METHOD")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--skip", type=Path, metavar="FOLDER")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE")
    parser.add_argument("--tasks", default=TASKS, help="separated by commas")
    parser.add_argument("--prompts", type=int, default=8, help="of each task")
    parser.add_argument("--speed", action="store_true", help="tokens per second of CPU time, and where it goes")
    parser.add_argument("--whole", action="store_true", help="with --speed: count the time to read prompts too")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--memory", default="prompt", help="who shares what drafters learn")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--samples", type=int, default=1, help="of each prompt, one after another; they share a memory")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    prompts = read_prompts(args)
    found = run(args, prompts)
    times = " | tokens per pass | pass, ms | draft, ms | accept, ms | rest, ms" if args.speed else ""
    label = "tokens per second" if args.speed else "tokens per pass"
    print(f"| {label} | {' | '.join(prompts)} | mean | ratio | positions{times} |")
    print("| --- " * (len(prompts) + (9 if args.speed else 4)) + "|")
    for method in args.methods:
        print(describe(method, found, prompts, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
