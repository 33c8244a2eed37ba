"""``draftwood inspect calibration``: do guesses come true as often as the drafter expects?"""

import argparse
from typing import Any

from draftwood.cli.console import BOLD, Paint, Screen, load_llm, run_info, show, table
from draftwood.cli.measuring import check_plot, measured_prompts, write_plot
from draftwood.cli.options import sampling_params
from draftwood.llm import LLM
from draftwood.plots import Line, assign_marks, plot_lines
from draftwood.progress import report
from draftwood.prompts import Conversation, prompt_ids
from draftwood.tune import NUM_BINS, Calibration, Reliability


def run(args: argparse.Namespace) -> int:
    check_plot(args.plot)
    params = sampling_params(args)
    screen = Screen(args.color)
    prompts = measured_prompts(args.prompts, args.limit)
    with load_llm(args, screen) as llm:
        calibration, tokens = _measure(llm, prompts, params, args.skip_tokens, screen)
        info = run_info(args, llm)
    if args.plot:
        _write_plot(calibration, args.plot)
        screen.note(f"Plot written to {args.plot}")
    return show(args, {**info, **_as_dict(calibration, len(prompts), tokens)}, _report(calibration, tokens, screen.out))


def _measure(
    llm: LLM, prompts: list[Conversation], params: Any, skipped: int, screen: Screen
) -> tuple[Calibration, int]:
    """Nodes of the first ``skipped`` tokens are left out, in which the drafter learns."""
    calibration, tokens = Calibration(), 0
    for number, prompt in enumerate(prompts):
        report(screen.progress, "measuring", number, len(prompts))
        for event in llm.stream(prompt_ids(llm.tokenizer, prompt), params):
            if tokens >= skipped:
                calibration.note(event.tree, event.path, len(event.token_ids))
            tokens += len(event.token_ids)
    report(screen.progress, "measuring", len(prompts), len(prompts))
    return calibration, tokens


def _as_dict(calibration: Calibration, num_prompts: int, tokens: int) -> dict[str, Any]:
    return {
        "prompts": num_prompts,
        "tokens": tokens,
        "calibration_error": round(calibration.error, 4),
        **calibration.total.as_dict(),
        "bins": [
            {"from": number / NUM_BINS, "to": (number + 1) / NUM_BINS, **own.as_dict()}
            for number, own in enumerate(calibration.bins)
        ],
        "sources": {name: own.as_dict() for name, own in calibration.sources.items()},
    }


def _report(calibration: Calibration, tokens: int, paint: Paint) -> list[str]:
    bins = [
        (f"{number / NUM_BINS:.1f} to {(number + 1) / NUM_BINS:.1f}", own)
        for number, own in enumerate(calibration.bins)
    ]
    return [
        f"{calibration.total.tried} guesses with an accepted parent, {tokens} tokens. "
        f"Calibration error: {calibration.error:.3f}.",
        "",
        *_rows("chance", bins, paint),
        "",
        *_rows("source", list(calibration.sources.items()), paint),
        "",
        paint("expected: the drafter's own chance; accepted: what came true", BOLD),
    ]


def _rows(name: str, rows: list[tuple[str, Reliability]], paint: Paint) -> list[str]:
    cells = [(name, "guesses", "expected", "accepted")]
    cells += [
        (label, f"{own.tried:7}", f"{own.expected_rate:8.3f}", f"{own.accepted_rate:8.3f}")
        for label, own in rows
        if own.tried
    ]
    return table(paint, cells)


def _write_plot(calibration: Calibration, path: str) -> None:
    marks = assign_marks(["accepted", "ideal"], has_legend=False)
    found = {own.expected_rate: own.accepted_rate for own in calibration.bins if own.tried}
    lines = [Line(marks["accepted"], found), Line(marks["ideal"], {0.0: 0.0, 1.0: 1.0})]
    panel = plot_lines(
        lines, title="reliability", x_name="expected acceptance", y_name="real acceptance", low=0.0, high=1.0
    )
    title = f"Reliability of chances, calibration error {calibration.error:.3f}"
    write_plot(path, title, [panel])
