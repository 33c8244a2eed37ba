"""Computes figures of two claims from a benchmark run that are not in its report.

    python benchmarks/claims.py sources RUN...    acceptance over all drafted nodes, and GOOSE's yield bound
    python benchmarks/claims.py overlap RUN...    n-grams shared by the answers to one prompt

RUN is a folder written by ``draftwood bench`` (recipes goose-figure5 and stand-figure2), or a folder of runs.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from draftwood.bench.records.run_folder import RequestRecord, read_runs
from draftwood.engine.stats import BRANCH_SOURCE, SPINE_SOURCE
from draftwood.tree.theory import isotropic_yield, optimal_widths, spine_yield

BRANCH_DEPTH = 6
NGRAMS = (2, 3, 4, 5)
COUNTS = (2, 4, 8, 16)


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
    parser.add_argument("what", choices=("sources", "overlap"))
    parser.add_argument("runs", nargs="+", metavar="RUN")
    args = parser.parse_args()
    records = [record for run in read_runs(args.runs) for record in run.records if record.error is None]
    {"sources": sources, "overlap": overlap}[args.what](records)


if __name__ == "__main__":
    main()
