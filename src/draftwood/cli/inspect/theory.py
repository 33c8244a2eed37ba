"""``draftwood inspect theory``: expected yield of draft trees at given acceptance rates."""

import argparse
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from draftwood.cli.console import BOLD, DIM, Paint, Screen, columns, pluralize, show, table
from draftwood.cli.measuring import check_plot, write_plot
from draftwood.plots import Line, assign_marks, plot_lines
from draftwood.tree import SpinePlan, TreeShape, ranked_tree, theory

SPINE = "spine tree"
MAX_BARS = 12
MIN_BAR, BAR_MARGIN = 8, 20


class Row(NamedTuple):
    """One tree of the comparison."""

    name: str
    nodes: int
    expected: float  # tokens per pass
    shape: str  # description


class Comparison(NamedTuple):
    plan: SpinePlan
    yields: list[float]  # expected tokens per pass with 1, 2, ... spine tokens
    rows: list[Row]  # the plan first


def run(args: argparse.Namespace) -> int:
    check_plot(args.plot)
    result = _compare(args.ps, args.pt, args.budget, args.branch_depth)
    screen = Screen(args.color)
    if args.plot:
        _write_plot(result, args.plot)
        screen.note(f"Plot written to {args.plot}")
    return show(args, _to_dict(args, result), [] if args.json else _format_report(args, result, screen.out))


def _compare(p_s: float, p_t: float, budget: int, branch_depth: int) -> Comparison:
    plan = theory.best_spine(p_s, p_t, budget, branch_depth)
    free = theory.best_spine(p_s, p_t, budget, branch_depth, free_chains=True)
    length, depth, num_branches = plan.spine_length, plan.branch_depth, sum(plan.widths)
    harmonic = theory.harmonic_widths(length, num_branches)
    spread = theory.spine_yield(p_s, p_t, length, harmonic, depth)
    acceptance = theory.geometric_acceptance(p_t, budget - 1)
    ranked = ranked_tree(acceptance, budget, budget)  # equals Sequoia's dynamic program here, for any budget
    arity, isotropic = theory.best_isotropic(p_t, budget)
    rows = [
        Row(SPINE, plan.num_nodes, plan.expected, _describe_spine(plan)),
        Row("  tails free", free.num_nodes, free.expected, _describe_spine(free)),
        Row(
            "  1/i widths",
            1 + length + depth * sum(harmonic),
            spread,
            f"the same spine, {pluralize(sum(harmonic), 'branch', 'branches')}",
        ),
    ]
    if p_s >= p_t:
        shape, expected = theory.two_rate_tree(p_s, p_t, budget)
        rows.append(Row("best of both", len(shape), expected, f"branches may branch again; {_describe_shape(shape)}"))
    rows.append(Row("chain", budget, theory.chain_yield(p_s, budget - 1), pluralize(budget - 1, "copied token")))
    for k in (3, 5):
        rows.append(Row(f"isotropic {k}", budget, theory.isotropic_yield(p_t, k, budget), f"{k} children per node"))
    rows.append(Row("best isotropic", budget, isotropic, f"{_count_children(arity)} per node"))
    rows.append(Row("sequoia", len(ranked), theory.expected_yield(ranked, acceptance), _describe_shape(ranked)))
    return Comparison(plan, theory.spine_yields(p_s, p_t, budget, depth).tolist(), rows)


def _describe_spine(plan: SpinePlan) -> str:
    tails = f" of {pluralize(plan.branch_depth, 'node')}" if any(plan.widths) else ""
    return f"a spine of {plan.spine_length}, {pluralize(sum(plan.widths), 'branch', 'branches')}{tails}"


def _describe_shape(shape: TreeShape) -> str:
    return f"{_count_children(shape.num_children[0])} at the root, depth {max(shape.depths)}"


def _count_children(number: int) -> str:
    return pluralize(number, "child", "children")


def _to_dict(args: argparse.Namespace, result: Comparison) -> dict[str, Any]:
    best = result.plan.expected
    return {
        "p_s": args.ps,
        "p_t": args.pt,
        "budget": args.budget,
        "branch_depth": args.branch_depth,
        "spine": result.plan._asdict(),
        "trees": [{**row._asdict(), "name": row.name.strip(), "ratio": row.expected / best} for row in result.rows],
        "yield_by_spine_length": result.yields,
    }


def _format_report(args: argparse.Namespace, result: Comparison, paint: Paint) -> list[str]:
    best = result.plan.expected
    apart = f" ({args.ps / args.pt:.3g} times lower)" if args.pt and args.ps > args.pt else ""
    cells = [("tree", "nodes", "tokens/pass", "ratio", "shape")]
    cells += [
        (row.name, f"{row.nodes:5}", f"{row.expected:11.3f}", f"{row.expected / best:5.2f}", row.shape)
        for row in result.rows
    ]
    widths = result.plan.widths[:MAX_BARS]
    lengths = _select_lengths(result.plan.spine_length, len(result.yields))
    below = sum(result.plan.widths[MAX_BARS:])
    return [
        f"Acceptance rate: spine {args.ps:g}, others {args.pt:g}{apart}. Budget: {args.budget} nodes.",
        "",
        *table(paint, cells),
        "",
        paint("tokens per pass by spine length (bars start at 1, plain decoding)", BOLD),
        *_draw_bars(paint, lengths, [result.yields[i - 1] for i in lengths], ".3f", 1.0, result.plan.spine_length),
        "",
        paint("branches per spine node (0 is the root)", BOLD),
        *_draw_bars(paint, range(len(widths)), widths, "d"),
        *([paint(f"  and {below} further down", DIM)] if below else []),
    ]


def _select_lengths(best: int, last: int) -> list[int]:
    """Select about a dozen spine lengths, the best one included."""
    end = min(last, max(MAX_BARS, 3 * best))
    step = math.ceil(end / MAX_BARS)
    return sorted({*range(1, end + 1, step), best})


def _draw_bars(
    paint: Paint, labels: Sequence[int], values: Sequence[float], form: str, start: float = 0.0, best: int | None = None
) -> list[str]:
    """Draw one bar per line, up to the width of the terminal. Mark the best one with a word."""
    full = max(MIN_BAR, columns() - BAR_MARGIN - max(len(format(value, form)) for value in values))
    unit = full / max(max(values) - start, 1e-12)
    block = _block_character(paint)
    lines = []
    for label, value in zip(labels, values, strict=True):
        bar = block * round((value - start) * unit)
        mark = " best" if label == best else ""
        lines.append(f"  {label:5}  {paint(bar, '38;5;73')}{' ' if bar else ''}{value:{form}}{mark}")
    return lines


def _block_character(paint: Paint) -> str:
    """Return a full block if the stream can encode it."""
    try:
        "█".encode(paint.stream.encoding or "utf-8")
    except UnicodeError:
        return "#"
    return "█"


def _write_plot(result: Comparison, path: str) -> None:
    curve = {float(length): tokens for length, tokens in enumerate(result.yields, 1)}
    best = f"best: {result.plan.spine_length}"
    others = [row for row in result.rows if row.name in ("chain", "best isotropic", "sequoia")]
    marks = assign_marks([SPINE, best, *(row.name for row in others)], has_legend=False)
    yields = [
        Line(marks[SPINE], curve),
        Line(marks[best], {float(result.plan.spine_length): result.plan.expected}),
        *(Line(marks[row.name], dict.fromkeys((1.0, float(len(curve))), row.expected)) for row in others),
    ]
    widths = Line(marks[SPINE], {float(node): float(width) for node, width in enumerate(result.plan.widths)})
    panels = [
        plot_lines(yields, title="yield", x_name="spine tokens", y_name="expected tokens per pass"),
        plot_lines([widths], title="branches", x_name="spine node, 0 is the root", y_name="branches", low=0.0),
    ]
    write_plot(path, "Expected tokens per verification pass", panels)
