"""Computes figures of claims from benchmark runs that are not in their reports.

    python benchmarks/claims.py paired RUN... --base METHOD    tokens per pass relative to a method, prompt by prompt
    python benchmarks/claims.py sources RUN...    acceptance over all drafted nodes, and GOOSE's yield bound
    python benchmarks/claims.py overlap RUN...    n-grams shared by the answers to one prompt

RUN is a folder written by ``draftwood bench`` (recipes goose-figure5 and stand-figure2), or a folder of runs, whose
records are pooled. A run that was cut off may be read too, and so may a recording (``draftwood bench record``), whose
texts are drafted again with ``--drafters``.

``paired`` takes the requests that both methods finished. The change of a task is the ratio of pooled tokens per pass,
the mean is over tasks, and its standard error is a jackknife over prompts: both methods leave the same prompt out.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from draftwood.bench.records import parse_methods
from draftwood.bench.records.run_folder import RequestRecord, read_runs
from draftwood.bench.replay import load_recording, replay
from draftwood.bench.settings import split_methods
from draftwood.config import DEFAULT_MEMORY
from draftwood.engine.stats import BRANCH_SOURCE, SPINE_SOURCE
from draftwood.tree.theory import isotropic_yield, optimal_widths, spine_yield

BRANCH_DEPTH = 6
NGRAMS = (2, 3, 4, 5)
COUNTS = (2, 4, 8, 16)
RECORDING = ".recording"


def row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"


def sources(records: Sequence[RequestRecord]) -> None:
    """Print accepted over drafted by method and task, and the bound of GOOSE's first proposition at these rates.

    Spine length: mean over cycles that copied. Budget: mean tree size. A branch counts as one node, as in the paper.
    """
    print(row(["method", "task", "p_s", "p_t", "ratio", "m", "B", "bound", "iso 3", "tau", "below tau", "above iso"]))
    print(row(["---"] * 12))
    groups: dict[tuple[str, str], list[RequestRecord]] = defaultdict(list)
    for record in records:
        if record.stats and SPINE_SOURCE in record.stats["drafted_by_source"]:
            groups[record.method, record.task].append(record)
    for (method, task), found in groups.items():
        drafted, accepted, routes = (
            sum((Counter(record.stats[name]) for record in found if record.stats), Counter[str]())
            for name in ("drafted_by_source", "accepted_by_source", "routes")
        )
        copying = routes["bypass"] + routes["spine"]
        if not copying or not drafted[BRANCH_SOURCE]:
            continue
        p_s, p_t = (accepted[name] / drafted[name] for name in (SPINE_SOURCE, BRANCH_SOURCE))
        cycles = sum(routes.values())
        length, budget = round(drafted[SPINE_SOURCE] / copying), round(sum(drafted.values()) / cycles) + 1
        widths = optimal_widths(p_s, p_t, length, max(budget - 1 - length, 0))
        bound, iso = spine_yield(p_s, p_t, length, widths, BRANCH_DEPTH), isotropic_yield(p_t, 3, budget)
        tau = sum(record.output_tokens for record in found) / cycles
        verdicts = ["yes" if bound <= tau else "no", "yes" if bound > iso else "no"]
        print(row([method, task, p_s, p_t, p_s / p_t, length, budget, bound, iso, tau, *verdicts]))


class Passes(NamedTuple):
    """Tokens and passes of one prompt with the base and with another method."""

    base_tokens: int
    base_passes: int
    tokens: int
    passes: int


class Change(NamedTuple):
    """Tokens per pass of both methods, relative change and its standard error."""

    base: float
    other: float
    change: float
    error: float  # NaN if a task has a single prompt
    num_prompts: int


def paired(records: Sequence[RequestRecord], base: str, counts: Sequence[int]) -> None:
    """Print how every method differs from the base: on all tasks, then by task."""
    tasks = list(dict.fromkeys(record.task for record in records))
    methods = [method for method in dict.fromkeys(record.method for record in records) if method != base]
    print(row(["method", "answers", "prompts", "base", "tokens per pass", "change", *tasks]))
    print(row(["---"] * (6 + len(tasks))))
    for method in methods:
        for count in counts:
            pairs = pair_prompts([record for record in records if record.sample < count], base, method)
            if pairs:
                whole, by_task = compare(pairs), {task: compare({task: pairs[task]}) for task in pairs}
                cells = [percent(by_task[task]) if task in by_task else "" for task in tasks]
                print(
                    row([method, count, whole.num_prompts, f"{whole.base:.2f}", f"{whole.other:.2f}", percent(whole)])
                    + " "
                    + " ".join(f"{cell} |" for cell in cells)
                )


def replay_records(path: str, drafters: str, budget: int) -> Iterable[RequestRecord]:
    """The requests of a recording, replayed with these methods."""
    recording = load_recording(Path(path))
    for method in parse_methods(split_methods(drafters), DEFAULT_MEMORY, [budget]):
        for result in replay(recording, method):
            text, stats = result.request, result.stats
            yield RequestRecord(
                method=method.label,
                task=text.task,
                prompt=text.prompt,
                turn=text.turn,
                sample=text.sample,
                output_tokens=stats.output_tokens,
                token_ids=list(text.output_ids),
                stats={"cycles": stats.cycles},
            )


def percent(change: Change) -> str:
    return f"{100 * change.change:+.1f}% ± {100 * change.error:.1f}"


def pair_prompts(records: Sequence[RequestRecord], base: str, method: str) -> dict[str, list[Passes]]:
    """The prompts of each task, over requests that both methods finished."""
    found: dict[str, dict[tuple[str, str, int, int, int], RequestRecord]] = {base: {}, method: {}}
    for record in records:
        if record.method in found and record.stats:
            found[record.method][record.key[1:]] = record
    prompts: dict[tuple[str, str], Passes] = defaultdict(lambda: Passes(0, 0, 0, 0))
    for key in found[base].keys() & found[method].keys():
        both = [found[base][key], found[method][key]]
        more = [number for record in both for number in (record.output_tokens, (record.stats or {})["cycles"])]
        prompts[key[:2]] = Passes(*(a + b for a, b in zip(prompts[key[:2]], more, strict=True)))
    pairs: dict[str, list[Passes]] = defaultdict(list)
    for (task, _), passes in sorted(prompts.items()):
        pairs[task].append(passes)
    return dict(pairs)


def compare(pairs: Mapping[str, Sequence[Passes]]) -> Change:
    """Mean over tasks, with the standard error over prompts."""
    base = sum(_tau(prompts)[0] for prompts in pairs.values()) / len(pairs)
    other = sum(_tau(prompts)[1] for prompts in pairs.values()) / len(pairs)
    variance, ratios = 0.0, []
    for prompts in pairs.values():
        ratios.append(_ratio(prompts))
        count = len(prompts)
        left = [_ratio([*prompts[:i], *prompts[i + 1 :]]) for i in range(count)] if count > 1 else [math.nan]
        mean = sum(left) / len(left)
        variance += (count - 1) / count * sum((ratio - mean) ** 2 for ratio in left) if count > 1 else math.nan
    change = sum(ratios) / len(pairs) - 1.0
    return Change(base, other, change, math.sqrt(variance) / len(pairs), sum(map(len, pairs.values())))


def _tau(prompts: Sequence[Passes]) -> tuple[float, float]:
    base_tokens, base_passes, tokens, passes = map(sum, zip(*prompts, strict=True))
    return base_tokens / base_passes, tokens / passes


def _ratio(prompts: Sequence[Passes]) -> float:
    base, other = _tau(prompts)
    return other / base


def overlap(records: Sequence[RequestRecord]) -> None:
    """Print the share of n-grams of the first k answers to a prompt that also occur in another of these answers."""
    answers: dict[tuple[str, str, str], dict[int, list[int]]] = defaultdict(dict)
    for record in records:
        answers[record.method, record.task, record.prompt][record.sample] = record.token_ids
    print(row(["answers", *(f"{n}-grams" for n in NGRAMS)]))
    print(row(["---"] * (1 + len(NGRAMS))))
    for count in COUNTS:
        sets = [[by[sample] for sample in sorted(by)[:count]] for by in answers.values() if len(by) >= count]
        if sets:
            print(row([count, *(shared(sets, n) for n in NGRAMS)]))


def shared(sets: Sequence[Sequence[Sequence[int]]], n: int) -> float:
    hits = total = 0
    for texts in sets:
        grams = [Counter(zip(*(text[i:] for i in range(n)), strict=False)) for text in texts]
        holders = Counter(gram for counts in grams for gram in counts)  # number of answers with the n-gram
        hits += sum(number for counts in grams for gram, number in counts.items() if holders[gram] > 1)
        total += sum(sum(counts.values()) for counts in grams)
    return hits / max(total, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("paired", "sources", "overlap"))
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--base", metavar="METHOD", help="paired: the label that others are compared with")
    parser.add_argument("--answers", default="1", metavar="LIST", help="paired: over the first answers, as in 1,4,16")
    parser.add_argument("--drafters", default="goose,pld", metavar="LIST", help="methods that replay a recording")
    parser.add_argument("--budget", type=int, default=60, help="positions per pass of a replay (default: 60)")
    args = parser.parse_args()
    recordings = [path for path in args.runs if path.endswith(RECORDING)]
    runs = read_runs([path for path in args.runs if path not in recordings])
    records = [record for run in runs for record in run.records if record.error is None]
    for path in recordings:
        records += replay_records(path, args.drafters, args.budget)
    if args.what == "paired":
        labels = sorted({record.method for record in records})
        if args.base not in labels:
            parser.error(f"--base must be one of: {', '.join(map(repr, labels))}")
        paired(records, args.base, [int(count) for count in args.answers.split(",")])
    else:
        {"sources": sources, "overlap": overlap}[args.what](records)


if __name__ == "__main__":
    main()
