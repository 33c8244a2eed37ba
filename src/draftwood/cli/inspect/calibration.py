"""``draftwood inspect calibration``: do guesses come true as often as the drafter expects?"""

import argparse
from collections.abc import Sequence
from typing import Any

from draftwood.cli.console import BOLD, Paint, Screen, load_llm, run_info, show, table
from draftwood.cli.measuring import check_plot, measured_prompts, write_plot
from draftwood.cli.options import sampling_params
from draftwood.engine import NUM_BINS, Calibration, TreeCounts
from draftwood.llm import LLM
from draftwood.plots import Line, assign_marks, plot_lines
from draftwood.progress import report
from draftwood.prompts import Conversation, prompt_ids

PROMPTS_OF_A_TASK = 2  # bundled ones, unless --limit is given


def run(args: argparse.Namespace) -> int:
    check_plot(args.plot)
    params = sampling_params(args)
    screen = Screen(args.color)
    prompts = measured_prompts(args.prompts, args.limit, of_a_task=PROMPTS_OF_A_TASK)
    with load_llm(args, screen) as llm:
        calibration, tokens = _measure(llm, prompts, params, args.skip_tokens, screen)
        info = run_info(args, llm)
    if args.plot:
        _write_plot(calibration, args.plot)
        screen.note(f"Plot written to {args.plot}")
    content = {**info, "prompts": len(prompts), "tokens": tokens, "calibration": calibration.as_dict()}
    return show(args, content, _report(calibration, tokens, screen.out))


def _measure(
    llm: LLM, prompts: list[Conversation], params: Any, skipped: int, screen: Screen
) -> tuple[Calibration, int]:
    """Nodes of the first ``skipped`` tokens are left out, in which the drafter learns."""
    trees, tokens = TreeCounts(), 0
    for number, prompt in enumerate(prompts):
        report(screen.progress, "measuring", number, len(prompts))
        for event in llm.stream(prompt_ids(llm.tokenizer, prompt), params):
            num_emitted = len(event.token_ids)
            if tokens >= skipped:
                trees.note(event.tree, event.path[1 : num_emitted + 1], num_emitted)
            tokens += num_emitted
    report(screen.progress, "measuring", len(prompts), len(prompts))
    return trees.calibration, tokens


def _report(calibration: Calibration, tokens: int, paint: Paint) -> list[str]:
    if not calibration.total.tried:
        return [f"No guesses were counted in {tokens} tokens. Give more prompts or tokens, or a lower --skip-tokens."]
    bins = [
        (f"{number / NUM_BINS:.1f} to {(number + 1) / NUM_BINS:.1f}", own.tried, own.expected_rate, own.accepted_rate)
        for number, own in enumerate(calibration.bins)
        if own.tried
    ]
    sources = [
        (name, own.tried, own.expected_rate, own.accepted_rate, calibration.error_of(name))
        for name, own in calibration.sources.items()
    ]
    return [
        f"{calibration.total.tried} guesses with an accepted parent, {tokens} tokens. "
        f"Calibration error: {calibration.error:.3f}.",
        "",
        *_rows(("chance", "guesses", "expected", "accepted"), bins, paint),
        "",
        *_rows(("source", "guesses", "expected", "accepted", "error"), sources, paint),
        "",
        paint("expected: the drafter's own chance; accepted: what came true", BOLD),
        "error: mean distance of the two, by chances in steps of 0.1",
    ]


def _rows(names: tuple[str, ...], rows: Sequence[tuple[Any, ...]], paint: Paint) -> list[str]:
    """A label, a count, and rates."""
    cells = [(label, f"{count:7}", *(f"{rate:8.3f}" for rate in rates)) for label, count, *rates in rows]
    return table(paint, [names, *cells])


def _write_plot(calibration: Calibration, path: str) -> None:
    marks = assign_marks(["accepted", "ideal"], has_legend=False)
    found = {own.expected_rate: own.accepted_rate for own in calibration.bins if own.tried}
    lines = [Line(marks["accepted"], found), Line(marks["ideal"], {0.0: 0.0, 1.0: 1.0})]
    panel = plot_lines(
        lines, title="reliability", x_name="expected acceptance", y_name="real acceptance", low=0.0, high=1.0
    )
    title = f"Reliability of chances, calibration error {calibration.error:.3f}"
    write_plot(path, title, [panel])
