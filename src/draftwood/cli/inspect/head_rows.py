"""What is told of a draft head, line by line: its shape, and what it is worth on texts."""

from __future__ import annotations

from typing import Any

from draftwood.cli.console import Paint, counted, table
from draftwood.heads import HeadConfig

_VARIANTS = {
    "qk_norm": "queries and keys normed",
    "norm_before_fc": "taps normed together",
    "fc_norm": "taps normed one by one",
    "norm_before_residual": "residual normed",
    "norm_output": "fed back normed",
    "own_embed": "embeddings of its own",
}


def shape_rows(config: HeadConfig) -> list[tuple[str, str]]:
    rows = []
    if config.num_heads_ahead:
        blocks = counted(config.num_residual, "residual block")
        rows.append(("looks ahead", f"{counted(config.num_heads_ahead, 'token')}, {blocks} for each"))
    if config.num_layers:
        attention = f"{config.num_heads} heads over {config.num_kv_heads}, {config.head_dim} wide"
        rows.append(("layers", f"{config.num_layers}, {config.hidden_size} wide, {attention}"))
    variants = [text for name, text in _VARIANTS.items() if getattr(config, name)]
    return [*rows, ("variant", ", ".join(variants))] if variants else rows


def taps_text(config: HeadConfig, taps: tuple[int, ...]) -> str:
    width = f"of {config.target_hidden_size}"
    if config.kind != "eagle3":
        return f"the last hidden state {width}, {'behind' if config.feature == 'normed' else 'before'} the final norm"
    if not taps:
        return f"{config.num_taps} hidden states {width}, the usual ones of its model"
    return f"the hidden states {', '.join(map(str, taps))} {width}"


def worth_lines(paint: Paint, worth: dict[str, Any]) -> list[str]:
    """What ``measure_worth`` found; nothing about what was not measured."""
    trees, ranks = worth.get("trees", {}), worth.get("ranks", [])
    facts = [("measured on", f"{worth['texts']:,} of {counted(worth['texts_there'], 'text')}")]
    if trees:
        answers = f"{counted(worth['prompts'], 'prompt')} with trees of {worth['budget']} nodes at most"
        facts.append(("answered", answers))
    if "beam" in trees:
        pruned, along = (f"{trees['beam'][name]:.0%}" for name in ("greedy_pruned", "accepted_greedy"))
        facts.append(("greedy path", f"pruned from {pruned} of beam's trees; {along} of accepted paths lie on it"))
    if "accuracy" in worth:
        facts.append(("accuracy", f"{worth['accuracy']:.3f} behind the text"))
    lines = ["", *table(paint, facts)]
    if trees:
        rows = [(name, f"{each['tau']:.3f}", f"{each['mean_tree_size']:.1f}") for name, each in trees.items()]
        lines += ["", *table(paint, [("growth", "tokens a pass", "nodes a tree"), *rows])]
    if ranks:
        names = ("accuracy", "ece", "ece_target")
        below = [(str(each["rank"]), *(f"{each[name]:.3f}" for name in names)) for each in ranks]
        heads = ("below guess", "accuracy", "calibration error", "for the model's token")
        lines += ["", *table(paint, [heads, *below])]
    return lines
