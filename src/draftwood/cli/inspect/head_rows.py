"""Rows that describe a draft head: its shape, and its evaluation on texts."""

from typing import Any

from draftwood.cli.console import Paint, pluralize, table
from draftwood.heads import HeadConfig

_VARIANTS = {
    "qk_norm": "QK norm",
    "norm_before_fc": "one norm over all taps",
    "fc_norm": "one norm per tap",
    "norm_before_residual": "norm before residual",
    "norm_output": "feeds back normed output",
    "own_embed": "own embeddings",
}


def shape_rows(config: HeadConfig) -> list[tuple[str, str]]:
    rows = []
    if config.num_heads_ahead:
        blocks = pluralize(config.num_residual, "residual block")
        rows.append(("predicts", f"{pluralize(config.num_heads_ahead, 'token')} ahead, {blocks} each"))
    if config.num_layers:
        attention = f"{config.num_heads} heads, {config.num_kv_heads} KV heads, head size {config.head_dim}"
        rows.append(("layers", f"{config.num_layers}, hidden size {config.hidden_size}, {attention}"))
    variants = [text for name, text in _VARIANTS.items() if getattr(config, name)]
    return [*rows, ("variant", ", ".join(variants))] if variants else rows


def taps_text(config: HeadConfig, taps: tuple[int, ...]) -> str:
    size = f"of size {config.target_hidden_size}"
    if config.kind != "eagle3":
        return f"the last hidden state {size}, {'after' if config.feature == 'normed' else 'before'} the final norm"
    if not taps:
        return f"{config.num_taps} hidden states {size}, the default ones of its model"
    return f"the hidden states {', '.join(map(str, taps))} {size}"


def worth_lines(paint: Paint, worth: dict[str, Any]) -> list[str]:
    """Format the result of ``measure_worth``. Omit what was not measured."""
    trees, ranks = worth.get("trees", {}), worth.get("ranks", [])
    facts = [("measured on", f"{worth['texts']:,} of {pluralize(worth['texts_there'], 'text')}")]
    if worth.get("coverage", 1.0) < 1.0:
        facts.append(("vocabulary", f"has {worth['coverage']:.1%} of the generated tokens"))
    if trees:
        answers = f"{pluralize(worth['prompts'], 'prompt')} with trees of up to {worth['budget']} nodes"
        facts.append(("answered", answers))
    if "beam" in trees:
        pruned, along = (f"{trees['beam'][name]:.0%}" for name in ("greedy_pruned", "accepted_greedy"))
        facts.append(("greedy path", f"pruned from {pruned} of beam trees; {along} of accepted paths are on it"))
    if "accuracy" in worth:
        facts.append(("accuracy", f"{worth['accuracy']:.3f} after the text"))
    lines = ["", *table(paint, facts)]
    if trees:
        rows = [(name, f"{each['tau']:.3f}", f"{each['mean_tree_size']:.1f}") for name, each in trees.items()]
        lines += ["", *table(paint, [("growth", "tokens/pass", "nodes/tree"), *rows])]
    if ranks:
        names = ("accuracy", "ece", "ece_target")
        below = [(str(each["rank"]), *(f"{each[name]:.3f}" for name in names)) for each in ranks]
        heads = ("after draft rank", "accuracy", "calibration error", "for the target's token")
        lines += ["", *table(paint, [heads, *below])]
    return lines
