"""``draftwood tune --explain``: does a tree pay here?"""

import argparse
from collections.abc import Sequence
from functools import partial

from draftwood.cli.console import BOLD, Paint, Screen, show, table
from draftwood.cli.measuring import check_plot, measured_prompts, write_plot
from draftwood.cli.options import model_options, sampling_params
from draftwood.heads import find_shipped_head, fingerprint
from draftwood.llm import LLM
from draftwood.plots import Line, assign_marks, plot_lines
from draftwood.prompts import prompt_ids
from draftwood.targets import Target, load_target
from draftwood.tune import Account, Way, best_of, explain, list_ways

PLAIN, AUTO = "plain", "auto"
DEFAULT = "tree"  # the way that runs without options, with --budget auto


def run(args: argparse.Namespace) -> int:
    check_plot(args.plot)
    screen = Screen(args.color)
    params = sampling_params(args)
    prompts = measured_prompts(args.prompts, args.limit, of_a_task=1)
    loaded = load_target(model_options(args, max_batch=1), screen.progress)
    accounts = explain(
        partial(LLM.from_target, loaded.target, loaded.codec, max_batch=1),
        [prompt_ids(loaded.codec, prompt) for prompt in prompts],
        params,
        list_ways(_shipped_head(loaded.target)),
        screen.progress,
    )
    if args.plot:
        _write_plot(accounts, args.plot)
        screen.note(f"Plot written to {args.plot}")
    best = best_of(accounts)
    content = {
        "model": loaded.target.info.name,
        "prompts": len(prompts),
        "ways": [account.as_dict() for account in accounts],
        "best": best.as_dict(),
    }
    first = f"{len(prompts)} prompts, {accounts[0].tokens} tokens each way; one request at a time, without prefill"
    return show(args, content, [first, "", *_report(accounts, best, screen.out)])


def _shipped_head(target: Target) -> str | None:
    info = target.info
    head = find_shipped_head(None, info, fingerprint(target.parts().norm)) if info.can_tap else None
    return None if head is None else head.name


def _report(accounts: Sequence[Account], best: Account, paint: Paint) -> list[str]:
    plain = accounts[0].tokens_per_second
    cells: list[tuple[str, ...]] = [
        ("decoding", "budget", "positions", "tokens/pass", "draft ms", "verify ms", "cycle ms", "tokens/s", "")
    ]
    for account in accounts:
        ratio = account.tokens_per_second / plain if plain else 0.0
        mark = paint(" best", BOLD) if account is best else ""
        cells.append(
            (
                account.way.label,
                f"{account.way.budget:>6}",
                f"{account.positions:9.1f}",
                f"{account.tokens_per_pass:11.2f}",
                *(f"{account.milliseconds(part):9.2f}" for part in ("draft", "verify", "total")),
                f"{account.tokens_per_second:8.1f}",
                f"{ratio:5.2f}x{mark}",
            )
        )
    return [*table(paint, cells), "", *_conclusion(accounts, best)]


def _conclusion(accounts: Sequence[Account], best: Account) -> list[str]:
    plain = max(accounts[0].tokens_per_second, 1e-9)
    fastest = f"{best.way.label}, {best.tokens_per_second / plain:.2f} times plain decoding: {_options(best.way)}"
    lines = [
        "chain: --drafter sam; tree: --drafter blend; positions: of a pass, the root included",
        "cycle: draft, verify and the rest of the host's work",
        "",
        "Nothing pays here: plain decoding is fastest." if best.way.label == PLAIN else f"Fastest: {fastest}",
    ]
    for account in accounts:
        if account.way.budget == AUTO:
            share = account.plain_cycles / max(account.cycles, 1)
            mark = " (the default)" if account.way.label == DEFAULT else ""
            lines.append(
                f"--budget auto, {account.way.label}{mark}: {account.tokens_per_second / plain:.2f} times plain "
                f"decoding, {account.positions:.1f} positions a pass, {share:.0%} of passes without guesses"
            )
    return [
        *lines,
        "Other processes disturb these times. Repeat it on an idle machine before you act on a few percent.",
    ]


def _options(way: Way) -> str:
    """How to get this way on the command line."""
    more = f" --sources {way.options['sources']}" if "sources" in way.options else ""
    return f"--drafter {way.drafter}{more} --budget {way.budget}"


def _write_plot(accounts: Sequence[Account], path: str) -> None:
    """A line over budgets for each way; what ``auto`` chose is a point at its mean positions."""
    ways: dict[str, dict[float, Account]] = {}
    for account in accounts:
        label, budget = account.way.label, account.way.budget
        if isinstance(budget, str):
            ways[f"{label}, {budget}"] = {round(account.positions): account}
        else:
            ways.setdefault(label, {})[budget] = account
    marks = assign_marks(list(ways), has_legend=False)

    def lines(value: str) -> list[Line]:
        return [
            Line(marks[label], {x: getattr(account, value) for x, account in own.items()})
            for label, own in ways.items()
        ]

    axis = "positions of a pass: budgets; for auto the mean"
    panels = [
        plot_lines(
            lines("tokens_per_pass"), title="tokens", x_name=axis, y_name="tokens per pass", low=1.0, logarithmic=True
        ),
        plot_lines(
            lines("tokens_per_second"),
            title="speed",
            x_name=axis,
            y_name="tokens per second",
            low=0.0,
            logarithmic=True,
        ),
    ]
    write_plot(path, "Does a tree pay here?", panels)
