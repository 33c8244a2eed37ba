"""Statistics and tables that commands print."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from draftwood.cli.console.answer import Answer
from draftwood.cli.console.terminal import BOLD, BONUS_SOURCE, Paint, Screen, first_source, quote
from draftwood.compare import Comparison
from draftwood.engine import RequestStats, TokenLogprobs
from draftwood.llm import LLM

SEPARATOR = " · "
DEPTHS_SHOWN = 6
_ORIGINS = {  # of guesses, by source
    "context": "copied from the text",
    "suffix": "copied from the text",
    "corpus": "copied from the corpus",
    "datastore": "copied from the datastore",
    "transition": "what followed before",
    "ngram": "what followed the same words",
    "position": "expected at this place before",
    "head": "a draft head",
}


def pluralize(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def speed_line(stats: RequestStats, finish_reason: str | None, *more: str) -> str:
    """Format what everybody wants to know: the speed, and how much of it guesses brought."""
    per_pass = f"{stats.acceptance_length:.2f} tokens per pass" if stats.drafted_nodes else ""
    parts = [pluralize(stats.output_tokens, "token"), f"{stats.tokens_per_second:.1f} tokens/s", per_pass, *more]
    return _join([*parts, *_describe_end(stats, finish_reason)])


def stats_line(stats: RequestStats, finish_reason: str | None, *more: str) -> str:
    """Format all main statistics, followed by ``more``."""
    parts = [
        pluralize(stats.output_tokens, "token"),
        f"{stats.tokens_per_second:.1f} tokens/s",
        f"tau {stats.acceptance_length:.2f}",
        pluralize(stats.cycles, "cycle"),
        f"trees of {stats.mean_tree_size:.1f}" if stats.cycles else "",
        _rates_text(stats),
        _routes_text(stats),
        *more,
    ]
    return _join([*parts, *_describe_end(stats, finish_reason)])


def _join(parts: Sequence[str]) -> str:
    return SEPARATOR.join(part for part in parts if part)


def _describe_end(stats: RequestStats, finish_reason: str | None) -> list[str]:
    if finish_reason == "length":
        return [f"cut at --max-tokens {stats.output_tokens}"]
    return ["stopped"] if finish_reason == "cancelled" else []


def _rates_text(stats: RequestStats) -> str:
    rates = stats.source_rates()
    if rates is None:
        return ""
    ratio = f" ({rates[0] / rates[1]:.1f}x)" if rates[1] else ""
    return f"p_s {rates[0]:.2f}, p_t {rates[1]:.2f}{ratio}"


def _routes_text(stats: RequestStats) -> str:
    """Format the share of each route, for drafters with several."""
    if len(set(stats.routes) - {"plain"}) < 2:
        return ""
    return ", ".join(f"{name} {count / stats.cycles:.0%}" for name, count in stats.routes.most_common())


def guesses_line(stats: RequestStats) -> str:
    """Format the acceptance rates by source and depth, and the accepted tokens by kind of path."""
    by_source = [f"{name} {rate:.2f}" for name, rate in stats.acceptance_by_source().items()]
    depths = stats.acceptance_by_depth()
    by_depth = [f"{rate:.2f}" for rate in depths[:DEPTHS_SHOWN]] + ["..."] * (len(depths) > DEPTHS_SHOWN)
    paths = [f"{name} {count}" for name, count in stats.accepted_by_path.most_common()]
    parts = [f"right guesses: {', '.join(by_source)}", f"by depth {' '.join(by_depth)}"]
    return SEPARATOR.join([*parts, f"accepted along {', '.join(paths)}"] if paths else parts)


def legend(paint: Paint, sources: Sequence[str]) -> str:
    """Format each source with its colour and share of the output. Empty without colours."""
    if not paint.enabled or not sources:
        return ""
    counts = Counter(sources)
    names = sorted(counts, key=lambda name: (name == BONUS_SOURCE, -counts[name]))
    return "  ".join(f"{paint.source('■', name)} {name} {counts[name] / len(sources):.0%}" for name in names)


def explain_colours(paint: Paint, sources: Sequence[str]) -> str:
    """Explain the colours of an answer in words. Empty without colours, or if nothing has one."""
    drafted = [name for name in dict.fromkeys(map(first_source, sources)) if name != BONUS_SOURCE]
    if not paint.enabled or not drafted:
        return ""
    colours = [f"{paint.source('■', name)} {_ORIGINS.get(name, name)}" for name in drafted]
    return "  ".join(["guessed right:", *colours, "□ the model itself"])


def show_summary(screen: Screen, answer: Answer, *more: str, full: bool = False) -> None:
    """Print the speed of an answer and its colours. ``full``: print all statistics."""
    if not full:
        screen.note(speed_line(answer.stats, answer.finish_reason, *more))
        screen.note_painted(explain_colours(screen.out, answer.sources))
        return
    screen.note(stats_line(answer.stats, answer.finish_reason, *more))
    if answer.stats.drafted_nodes:
        screen.note(guesses_line(answer.stats))
    screen.note_painted(legend(screen.out, answer.sources))


def comparison_line(comparison: Comparison) -> str:
    if comparison.identical is None:
        outcome = "sampled: same distribution, different samples"
    elif comparison.identical:
        outcome = "identical output"
    else:
        outcome = f"outputs differ from token {comparison.first_difference} on, see: draftwood check"
    plain, drafted = (run.stats.tokens_per_second for run in (comparison.plain, comparison.speculative))
    speeds = f"{drafted:.1f} against {plain:.1f} tokens/s"
    return SEPARATOR.join([f"{comparison.speedup:.2f}x the speed of plain decoding ({speeds})", outcome])


def logprob_lines(llm: LLM, logprobs: Sequence[TokenLogprobs]) -> list[str]:
    lines = []
    for token_id, logprob, top in logprobs:
        others = "  ".join(f"{quote(llm.tokenizer.token_text(i))} {value:.3f}" for i, value in top)
        lines.append(f"{quote(llm.tokenizer.token_text(token_id)):16} {logprob:8.3f}   {others}")
    return lines


def table(paint: Paint, rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align columns. The first one is bold, the last one is not padded."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for first, *middle, last in rows:
        cells = [f"{cell:{size}}" for cell, size in zip(middle, widths[1:], strict=True)]
        lines.append("  ".join([paint(f"{first:{widths[0]}}", BOLD), *cells, last]))
    return lines


def show(args: argparse.Namespace, content: dict[str, Any], lines: Sequence[str]) -> int:
    """Print a result, as JSON with --json. Return exit code 0."""
    print(json.dumps(content, ensure_ascii=False, default=str) if args.json else "\n".join(lines))
    return 0
