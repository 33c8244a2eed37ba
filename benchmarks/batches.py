"""Compares drafters with plain decoding, by batch size and task: tokens per second, and whether answers are equal.

    python benchmarks/batches.py --model MODEL.gguf --data PROMPTS --tasks humaneval,gsm8k,mt_bench --batches 1,8,32
    python benchmarks/batches.py --model MODEL.gguf --data PROMPTS --exact --alone --limit 100 plain goose:budget=60

All drafters run the same prompts in turns, one task after the other; prompts are repeated so that each place of a batch
has several requests (``--per-place``): when one ends, another begins, and only the last ones run beside empty places.
Seconds are wall-clock time from the first request to the last token, prompts included, after a run that compiles and
captures what the task needs. ``--alone`` also compares every answer with plain decoding of one request at a time.
Drafters are names with options, for example ``eagle3:budget=60``; without a budget it is ``auto``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftwood import LLM, Completion, SamplingParams
from draftwood.bench.records.machine import describe_machine
from draftwood.bench.tasks.load import load_tasks
from draftwood.config import QUANTIZE, ModelOptions
from draftwood.drafters import check_drafter
from draftwood.engine.ways import Ways
from draftwood.errors import DraftwoodError
from draftwood.prompts import prompt_ids
from draftwood.targets.load import Loaded, load_target

PLAIN = "plain"
TURNS = ("auto", "always", "never")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One drafter, batch size and task."""

    drafter: str
    batch: int
    task: str
    turns: str
    prompts: int
    tokens_per_second: float  # the best round's
    times_plain: float  # median over rounds
    tau: float
    nodes: float
    host: float  # share of the time that is neither prefill nor verification
    equal: float  # answers like those of plain decoding in the same batch
    equal_alone: float | None  # like those of plain decoding alone


class Runner:
    def __init__(self, loaded: Loaded, args: argparse.Namespace) -> None:
        self._loaded, self._args = loaded, args
        self._params = SamplingParams(
            max_tokens=args.max_tokens,
            ignore_eos=args.ignore_eos,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=1,
        )
        self._alone: dict[tuple[int, ...], list[int]] = {}

    def cells(self, batch: int, task: str, prompts: Sequence[list[int]]) -> list[Cell]:
        args = self._args
        methods = [(drafter, turns) for drafter in args.drafters for turns in args.turns]
        llms = {method: self._llm(method[0], batch) for method in methods}
        made: dict[tuple[str, str], list[Completion]] = {}
        seconds: dict[tuple[str, str], list[float]] = {method: [] for method in methods}
        for number in range(args.rounds + 1):  # the first one warms up
            for method, llm in llms.items():
                set_turns(method[1])
                started = time.perf_counter()
                made[method] = llm.generate(list(prompts), self._params)
                if number:
                    seconds[method].append(time.perf_counter() - started)
        alone = None
        if args.alone:
            set_turns("never")
            with self._llm(f"{PLAIN}:budget=1", 1) as llm:
                alone = [self._answer_alone(llm, prompt) for prompt in prompts]
        cells = [self._cell((batch, task), method, made, seconds, next(iter(methods)), alone) for method in methods]
        for llm in llms.values():
            llm.close()
        return cells

    def _cell(
        self,
        place: tuple[int, str],
        method: tuple[str, str],
        made: dict[tuple[str, str], list[Completion]],
        seconds: dict[tuple[str, str], list[float]],
        first: tuple[str, str],
        alone: list[list[int]] | None,
    ) -> Cell:
        answers = made[method]
        found = [answer.stats for answer in answers]
        tokens, base = (sum(len(answer.token_ids) for answer in made[which]) for which in (method, first))
        cycles = sum(stats.cycles for stats in found)
        rates, plain = (
            [count / taken for taken in seconds[which]] for which, count in ((method, tokens), (first, base))
        )
        spent = sum(stats.prefill_seconds + stats.verify_seconds for stats in found)
        equal = [answer.token_ids == other.token_ids for answer, other in zip(answers, made[first], strict=True)]
        return Cell(
            drafter=method[0],
            batch=place[0],
            task=place[1],
            turns=method[1],
            prompts=len(answers),
            tokens_per_second=max(rates),
            times_plain=statistics.median(rate / other for rate, other in zip(rates, plain, strict=True)),
            tau=tokens / cycles,
            nodes=1 + sum(stats.drafted_nodes for stats in found) / cycles,
            host=1.0 - spent / seconds[method][-1],
            equal=statistics.mean(equal),
            equal_alone=None
            if alone is None
            else statistics.mean(
                list(answer.token_ids) == wanted for answer, wanted in zip(answers, alone, strict=True)
            ),
        )

    def _answer_alone(self, llm: LLM, prompt: list[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self._alone:
            self._alone[key] = list(llm.generate([prompt], self._params)[0].token_ids)
        return self._alone[key]

    def _llm(self, text: str, batch: int) -> LLM:
        drafter, options = parse_drafter(text)
        budget = options.pop("budget", "auto")
        target, codec = self._loaded.target, self._loaded.codec
        return LLM.from_target(
            target, codec, drafter=drafter, drafter_options=options, budget=budget, max_batch=batch, memory="request"
        )


def parse_drafter(text: str) -> tuple[str, dict[str, Any]]:
    """``name:key=value,key=value``; numbers are numbers."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        options[key] = _parse_value(value)
    return name, options


def _parse_value(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def set_turns(turns: str) -> None:
    """Fixes whether the requests of a batch take turns."""
    Ways.turns = {"auto": (False, True), "always": (True,), "never": (False,)}[turns]


def table(cells: Sequence[Cell]) -> str:
    """A row for each batch size, drafter and turns: times plain decoding in the mean and by task."""
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    lines = ["| batch | drafter | turns | mean | " + " | ".join(tasks) + " | tokens/s | tau | nodes | host | equal |"]
    lines.append("| --- " * (9 + len(tasks)) + "|")
    rows: dict[tuple[int, str, str], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.batch):
        rows.setdefault((cell.batch, cell.drafter, cell.turns), []).append(cell)
    lines += [_row(*row, group, tasks) for row, group in rows.items()]
    return "\n".join(lines)


def _row(batch: int, drafter: str, turns: str, cells: Sequence[Cell], tasks: Sequence[str]) -> str:
    by_task = {cell.task: f"{cell.times_plain:.2f}x" for cell in cells}
    mean, rate, tau, nodes, host = (
        statistics.mean(getattr(cell, name) for cell in cells)
        for name in ("times_plain", "tokens_per_second", "tau", "nodes", "host")
    )
    equal = round(sum(cell.equal * cell.prompts for cell in cells))
    total, alone = sum(cell.prompts for cell in cells), [cell.equal_alone for cell in cells]
    told = f"{equal} of {total}"
    if all(share is not None for share in alone):
        told += f", alone {round(sum((cell.equal_alone or 0.0) * cell.prompts for cell in cells))}"
    figures = " | ".join(by_task.get(task, "") for task in tasks)
    return (
        f"| {batch} | {drafter} | {turns} | {mean:.2f}x | {figures} "
        f"| {rate:,.0f} | {tau:.2f} | {nodes:.1f} | {host:.0%} | {told} |"
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    how = {"dtype": args.dtype, "quantize": args.quantize, "exact": args.exact, "device": args.device}
    try:
        for text in args.drafters:
            drafter, options = parse_drafter(text)
            check_drafter(drafter, {key: value for key, value in options.items() if key != "budget"})
        tasks = load_tasks(args.tasks, args.data, args.limit)
        loaded = load_target(ModelOptions(model=args.model, **how, max_batch=max(args.batches)))
    except DraftwoodError as error:
        print(error, file=sys.stderr)
        return 2
    gc.freeze()  # as the server does: a collection of all loaded objects takes as long as a tenth of a round
    runner, cells = Runner(loaded, args), list[Cell]()
    for batch in args.batches:
        for task in tasks:
            found = [prompt_ids(loaded.codec, prompt.turns[0]) for prompt in task.prompts]
            count = len(found) if batch == 1 else max(len(found), args.per_place * batch)
            started = time.perf_counter()
            cells += runner.cells(batch, task.name, list(itertools.islice(itertools.cycle(found), count)))
            print(f"batch {batch}, {task.name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
            if args.out is not None:
                facts = {"argv": sys.argv[1:], "machine": describe_machine(), "cells": [asdict(cell) for cell in cells]}
                args.out.write_text(json.dumps(facts, indent=1), encoding="utf-8")
        print(table([cell for cell in cells if cell.batch == batch]), flush=True)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    def numbers(text: str) -> list[int]:
        return [int(number) for number in names(text)]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="*", default=[PLAIN, "goose"], help="the first is what the others compare to")
    parser.add_argument("--model", default="smollm2", help="a known name, a folder or a GGUF file")
    parser.add_argument("--data", help="prompts, as for draftwood bench; default: bundled")
    parser.add_argument("--tasks", type=names, default=[], help="tasks; default: all")
    parser.add_argument("--limit", type=int, default=8, help="prompts per task")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument("--per-place", type=int, default=2, help="requests for each place of a batch, at least")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--rounds", type=int, default=2, help="timed runs")
    parser.add_argument("--turns", type=names, default=["auto"], help=f"some of {','.join(TURNS)}: see engine/ways.py")
    parser.add_argument("--alone", action="store_true", help="compare with plain decoding of one request at a time")
    parser.add_argument("--dtype", default="bfloat16", choices=("auto", "float32", "float16", "bfloat16"))
    parser.add_argument("--quantize", choices=QUANTIZE)
    parser.add_argument("--exact", action="store_true", help="passes with the same bits for a row in every pass")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="write all figures to a JSON file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
