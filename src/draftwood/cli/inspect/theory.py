"""``draftwood inspect theory``: what trees are expected to yield at given acceptance rates."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from draftwood.cli.console import BOLD, DIM, Paint, Screen, Subparsers, add_command, columns, counted, show, table
from draftwood.errors import MissingExtraError, OptionError

if TYPE_CHECKING:
    from draftwood.tree import SpinePlan

EXAMPLES = (
    "draftwood inspect theory --ps 0.3 --pt 0.03 --budget 60",
    "draftwood inspect theory --ps 0.6 --pt 0.05 --budget 16 --json",
    "draftwood inspect theory --ps 0.3 --pt 0.03 --plot yield.svg",
)
_DETAILS = """\
Copied tokens (the spine) are right with probability p_s, all others with p_t, each independently.
Tokens per pass count the target's own token; nodes count the root. A branch is a chain: all of its
nodes are counted, except in the row 'tails free', which counts the first one only. A node may have
any number of children, also more than a table of successors holds."""
PLOT_FORMATS = (".png", ".svg")
MAX_BARS = 12
MIN_BAR, BAR_MARGIN = 8, 20


class Row(NamedTuple):
    """One tree of the comparison."""

    name: str
    nodes: int
    expected: float  # tokens per pass
    shape: str  # in words


class Comparison(NamedTuple):
    plan: SpinePlan
    yields: list[float]  # of the spine trees with 1, 2, ... spine tokens
    rows: list[Row]  # the first is the plan's


def register(views: Subparsers[Any]) -> None:
    parser = add_command(
        views, "theory", run, "Compare what trees yield at given acceptance rates", *EXAMPLES, details=_DETAILS
    )
    parser.add_argument("--ps", type=float, default=0.3, metavar="P", help="acceptance on the spine (default: 0.3)")
    parser.add_argument("--pt", type=float, default=0.03, metavar="P", help="acceptance elsewhere (default: 0.03)")
    parser.add_argument("--budget", type=int, default=60, metavar="N", help="nodes, the root included (default: 60)")
    parser.add_argument(
        "--branch-depth", type=int, default=6, metavar="N", help="nodes of a branch at most (default: 6)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--plot", metavar="FILE", help="draw it into a .png or .svg file as well (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    figure = _figure(args.plot) if args.plot else None
    found = _compare(args.ps, args.pt, args.budget, args.branch_depth)
    screen = Screen(args.color)
    if figure is not None:
        _draw(figure, found, args.plot)
        screen.note(f"The plot is in {args.plot}.")
    return show(args, _as_dict(args, found), [] if args.json else _lines(args, found, screen.out))


def _compare(p_s: float, p_t: float, budget: int, branch_depth: int) -> Comparison:
    from draftwood.tree import ranked_tree, theory

    plan = theory.best_spine(p_s, p_t, budget, branch_depth)
    free = theory.best_spine(p_s, p_t, budget, branch_depth, free_chains=True)
    length, depth, num_branches = plan.spine_length, plan.branch_depth, sum(plan.widths)
    harmonic = theory.harmonic_widths(length, num_branches)
    spread = theory.spine_yield(p_s, p_t, length, harmonic, depth)
    acceptance = theory.geometric_acceptance(p_t, budget - 1)
    ranked = ranked_tree(acceptance, budget, budget)  # as good as sequoia's programme here, at any budget
    arity, isotropic = theory.best_isotropic(p_t, budget)
    rows = [
        Row("spine tree", plan.num_nodes, plan.expected, _spine_words(plan)),
        Row("  tails free", free.num_nodes, free.expected, _spine_words(free)),
        Row(
            "  1/i widths",
            1 + length + depth * sum(harmonic),
            spread,
            f"the same spine, {_number(sum(harmonic), 'branch', 'branches')}",
        ),
    ]
    if p_s >= p_t:
        shape, expected = theory.two_rate_tree(p_s, p_t, budget)
        words = f"branches may branch again; {_children(shape.num_children[0])} at the root, depth {max(shape.depths)}"
        rows.append(Row("best of both", len(shape), expected, words))
    rows.append(Row("chain", budget, theory.chain_yield(p_s, budget - 1), counted(budget - 1, "copied token")))
    for k in (3, 5):
        rows.append(Row(f"isotropic {k}", budget, theory.isotropic_yield(p_t, k, budget), f"{k} children a node"))
    rows.append(Row("best isotropic", budget, isotropic, f"{_children(arity)} a node"))
    words = f"{_children(ranked.num_children[0])} at the root, depth {max(ranked.depths)}"
    rows.append(Row("sequoia", len(ranked), theory.expected_yield(ranked, acceptance), words))
    return Comparison(plan, theory.spine_yields(p_s, p_t, budget, depth).tolist(), rows)


def _spine_words(plan: SpinePlan) -> str:
    tails = f" of {counted(plan.branch_depth, 'node')}" if any(plan.widths) else ""
    return f"a spine of {plan.spine_length}, {_number(sum(plan.widths), 'branch', 'branches')}{tails}"


def _children(number: int) -> str:
    return _number(number, "child", "children")


def _number(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _as_dict(args: argparse.Namespace, found: Comparison) -> dict[str, Any]:
    best = found.plan.expected
    return {
        "p_s": args.ps,
        "p_t": args.pt,
        "budget": args.budget,
        "branch_depth": args.branch_depth,
        "spine": found.plan._asdict(),
        "trees": [{**row._asdict(), "name": row.name.strip(), "ratio": row.expected / best} for row in found.rows],
        "yield_by_spine_length": found.yields,
    }


def _lines(args: argparse.Namespace, found: Comparison, paint: Paint) -> list[str]:
    best = found.plan.expected
    apart = f", {args.ps / args.pt:.3g} times as often" if args.pt else ""
    cells = [("tree", "nodes", "tokens/pass", "ratio", "shape")]
    cells += [
        (row.name, f"{row.nodes:5}", f"{row.expected:11.3f}", f"{row.expected / best:5.2f}", row.shape)
        for row in found.rows
    ]
    widths = found.plan.widths[:MAX_BARS]
    lengths = _sample(found.plan.spine_length, len(found.yields))
    below = sum(found.plan.widths[MAX_BARS:])
    return [
        f"Spine tokens are right with {args.ps:g}, others with {args.pt:g}{apart}. Budget {args.budget}.",
        "",
        *table(paint, cells),
        "",
        paint("tokens per pass over the spine's length, beyond the 1 of plain decoding", BOLD),
        *_bars(paint, lengths, [found.yields[i - 1] for i in lengths], ".3f", 1.0, found.plan.spine_length),
        "",
        paint("branches at each spine node, the root is 0", BOLD),
        *_bars(paint, range(len(widths)), widths, "d"),
        *([paint(f"  and {below} further down", DIM)] if below else []),
    ]


def _sample(best: int, last: int) -> list[int]:
    """Up to about a dozen spine lengths around the best, which is among them."""
    end = min(last, max(MAX_BARS, 3 * best))
    step = math.ceil(end / MAX_BARS)
    return sorted({*range(1, end + 1, step), best})


def _bars(
    paint: Paint, labels: Sequence[int], values: Sequence[float], form: str, start: float = 0.0, best: int | None = None
) -> list[str]:
    """A bar a line, as wide as the terminal allows; the best one is marked in words."""
    full = max(MIN_BAR, columns() - BAR_MARGIN - max(len(format(value, form)) for value in values))
    unit = full / max(max(values) - start, 1e-12)
    letter = _block(paint)
    lines = []
    for label, value in zip(labels, values, strict=True):
        bar = letter * round((value - start) * unit)
        mark = " best" if label == best else ""
        lines.append(f"  {label:5}  {paint(bar, '38;5;73')}{' ' if bar else ''}{value:{form}}{mark}")
    return lines


def _block(paint: Paint) -> str:
    """A full block where the stream can show one."""
    try:
        "█".encode(paint.stream.encoding or "utf-8")
    except UnicodeError:
        return "#"
    return "█"


def _figure(path: str) -> Any:
    """An empty figure, before any time is spent: the file's kind must be known and matplotlib installed."""
    if Path(path).suffix.lower() not in PLOT_FORMATS:
        raise OptionError("A plot cannot be written into this kind of file", got=path, allowed=PLOT_FORMATS)
    try:
        figures = import_module("matplotlib.figure")
    except ImportError:
        raise MissingExtraError("Drawing a plot", "matplotlib", "plots") from None
    return figures.Figure(figsize=(10, 4), layout="constrained")


def _draw(figure: Any, found: Comparison, path: str) -> None:
    curve, bars = figure.subplots(1, 2)
    lengths = range(1, len(found.yields) + 1)
    curve.plot(lengths, found.yields, label="spine tree")
    curve.plot([found.plan.spine_length], [found.plan.expected], "o", color="C0")
    for number, row in enumerate(row for row in found.rows if row.name in ("chain", "best isotropic", "sequoia")):
        curve.axhline(row.expected, color=f"C{number + 1}", linestyle="--", label=row.name)
    curve.set(xlabel="spine tokens", ylabel="expected tokens per pass")
    curve.legend()
    bars.bar(range(found.plan.spine_length), found.plan.widths)
    bars.xaxis.get_major_locator().set_params(integer=True)
    bars.set(xlabel="spine node, the root is 0", ylabel="branches")
    try:
        figure.savefig(path)
    except OSError as error:
        raise OptionError(f"The plot cannot be written to {path}", got=error.strerror or error) from error
