"""The text of a report: setup, headline and warnings."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from draftwood.bench.figures import MAX_OTHER_LOAD, Cell, Summary, is_above_tau
from draftwood.bench.records import ERROR, IDENTICAL, TIE
from draftwood.bench.report import text
from draftwood.bench.report.tables import cell, is_peer, labels, num_prompts, prompts_note


class Fact(NamedTuple):
    name: str
    value: str


def facts(summary: Summary) -> list[Fact]:
    """List the setup, as far as the manifest records it."""
    manifest = summary.manifest
    settings: Mapping[str, Any] = manifest.get("settings") or {}
    model: Mapping[str, Any] = manifest.get("model") or {}
    found = [
        ("model", _format_model(model, settings)),
        ("dtype", _format_value(model.get("dtype") or settings.get("dtype"))),
        ("backend", _format_value(model.get("backend") or settings.get("target"))),
        ("device", _format_value(model.get("device") or settings.get("device"))),
        ("machine", _format_machine(manifest.get("machine") or {})),
        ("versions", ", ".join(f"{name} {version}" for name, version in (manifest.get("software") or {}).items())),
        ("prompts", _format_prompts(summary)),
        ("max_tokens", _format_value(settings.get("max_tokens"))),
        ("temperature", _format_value(settings.get("temperature"))),
        ("top_p", _format_value(settings.get("top_p") if settings.get("top_p") != 1.0 else None)),
        ("top_k", _format_value(settings.get("top_k") or None)),
        ("seed", _format_value(settings.get("seed"))),
        ("budget", _format_value(settings.get("budget"))),
        ("memory", _format_value(settings.get("memory"))),
        ("repeats", _format_unless_one(settings.get("repeats"))),
        ("trajectories", _format_unless_one(settings.get("trajectories"))),
        ("batch", _format_unless_one(settings.get("batch"))),
        ("ignore_eos", "yes" if settings.get("ignore_eos") else ""),
        ("raw", "yes: no chat template" if settings.get("raw") else ""),
        ("recipe", _format_value(manifest.get("recipe"))),
        ("runs", ", ".join(summary.runs)),
        ("started", _format_value(manifest.get("started"))),
        ("finished", "not yet" if _is_unfinished(manifest) else _format_value(manifest.get("finished"))),
    ]
    return [Fact(name, value) for name, value in found if value]


def command(summary: Summary) -> str:
    return str(summary.manifest.get("command") or "").strip()


def setting(summary: Summary) -> str:
    """Summarize the setup in one line."""
    by_name = {fact.name: fact.value for fact in facts(summary)}
    parts = [by_name[name] for name in ("model", "dtype", "device") if name in by_name]
    parts += [prompts_note(summary)] if prompts_note(summary) else []
    parts += [f"temperature {by_name['temperature']}"] if "temperature" in by_name else []
    return " · ".join(parts)


def headline(summary: Summary) -> str:
    """Describe the fastest method: correct methods come before others, drafters before peers."""
    failed = summary.manifest.get("failed") or {}
    peers = {str(method["label"]) for method in summary.methods if is_peer(method)}

    def rank(one: Cell, speed: float) -> tuple[bool, bool, bool, float]:
        correct = not one.lossless.get(ERROR) and one.method not in failed
        return (correct, one.method not in peers, not _is_implausible(one), speed)

    found = [cell(summary, label) for label in labels(summary)]
    ratios = [(rank(one, speed), one) for one in found if (speed := text.finite(one.speedup)) is not None]
    ratios = [pair for pair in ratios if pair[1].method != summary.baseline]
    if ratios and summary.baseline is not None:
        best = max(ratios, key=_first)[1]
        figure, _, bounds = text.with_interval(best.speedup, 2, "x").partition(" ")
        sure = f" {bounds}" if bounds else ""
        if _is_implausible(best) and best.tau:
            sure += f", more than its {best.tau.value:.2f} tokens per pass: times are disturbed"
        return f"{best.method} decodes {figure} as fast as plain decoding{sure}{_format_outputs(best)}."
    speeds = [(rank(one, speed), one) for one in found if (speed := text.finite(one.tokens_per_second)) is not None]
    if not speeds:
        return "No request has finished yet."
    best = max(speeds, key=_first)[1]
    return f"{best.method} decodes {text.with_interval(best.tokens_per_second, 1)} tokens/s{_format_outputs(best)}."


def warnings(summary: Summary) -> list[str]:
    """List problems, and whether the run is unfinished."""
    unfinished = "The run is not finished: figures cover the requests so far."
    return [*list_problems(summary), *list_doubts(summary), *([unfinished] if _is_unfinished(summary.manifest) else [])]


def list_doubts(summary: Summary) -> list[str]:
    """List signs that times were disturbed."""
    load = summary.manifest.get("other_load") or 0.0
    found = []
    if load > MAX_OTHER_LOAD:
        found.append(f"Other processes used {load:.0%} of the cores during the run: times are disturbed.")
    for label in labels(summary):
        one = cell(summary, label)
        if _is_implausible(one):
            figures = f"{text.with_interval(one.speedup, 2, 'x')} at {text.with_interval(one.tau, 2)} tokens per pass"
            found.append(f"{label}: {figures}. Drafting cannot gain more than that: times are disturbed.")
    return found


def _is_implausible(one: Cell) -> bool:
    return is_above_tau(one.speedup.value if one.speedup else None, one.tau.value if one.tau else None)


def list_problems(summary: Summary) -> list[str]:
    """List wrong outputs and failures, most important first; empty if everything is correct."""
    found = []
    for label in labels(summary):
        one = cell(summary, label)
        wrong = one.lossless.get(ERROR, 0)
        if wrong:
            found.append(
                f"{label}: {wrong} of {text.counted(sum(one.lossless.values()), 'output')} "
                f"{'is' if wrong == 1 else 'are'} not identical to plain decoding. "
                "Its figures are invalid until this is fixed."
            )
    failed = summary.manifest.get("failed") or {}
    found += [f"{label} failed: {_one_line(reason)}" for label, reason in failed.items()]
    for label in labels(summary):
        errors = cell(summary, label).errors
        if errors:
            found.append(f"{label}: {text.counted(errors, 'request')} failed.")
    return found


def _first(pair: tuple[tuple[bool, bool, bool, float], Cell]) -> tuple[bool, bool, bool, float]:
    return pair[0]


def _format_outputs(best: Cell) -> str:
    compared = sum(best.lossless.values())
    if not compared:
        return ""
    ties = best.lossless.get(TIE, 0)
    more = f", {text.counted(ties, 'tie')}" if ties else ""
    more += f", {best.lossless[ERROR]} WRONG" if best.lossless.get(ERROR) else ""
    return f", {best.lossless.get(IDENTICAL, 0)} of {text.counted(compared, 'output')} identical{more}"


def _format_value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_format_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _format_unless_one(value: Any) -> str:
    return "" if value in (1, [1], (1,)) else _format_value(value)


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())


def _is_unfinished(manifest: Mapping[str, Any]) -> bool:
    return bool(manifest.get("started")) and not manifest.get("finished")


def _format_model(model: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    name = str(model.get("name") or settings.get("model") or "")
    size = model.get("parameters")
    return f"{name}, {text.large(size)} parameters" if size else name


def _format_machine(machine: Mapping[str, Any]) -> str:
    """Format processor, cores, memory, GPU and system in one line; unknown facts are omitted."""
    parts = []
    for name, value in machine.items():
        if value in (None, "", [], {}):
            continue
        if name == "memory_gb":
            parts.append(f"{value} GB memory")
        elif name in ("cores", "threads") and isinstance(value, int):
            parts.append(text.counted(value, name[:-1]))
        else:
            parts.append(_format_value(value))
    return ", ".join(parts)


def _format_prompts(summary: Summary) -> str:
    counts = {task: num_prompts(summary, task) for task in summary.tasks}
    parts = ", ".join(f"{task} {count or text.NOTHING}" for task, count in counts.items())
    return f"{sum(counts.values())} ({parts})" if all(counts.values()) and counts else parts
