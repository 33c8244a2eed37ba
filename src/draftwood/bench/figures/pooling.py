"""Groups comparable runs, titles them, and merges their manifests and methods."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from draftwood.bench.records import DRAFTER, PLAIN, BenchRun, RunManifest

# What two runs must have in common to be pooled, besides the machine.
POOLED_MODEL = ("name", "dtype", "backend", "device")
POOLED_SOFTWARE = ("draftwood", "torch")
POOLED_SETTINGS = ("temperature", "top_p", "top_k", "max_tokens", "ignore_eos", "trajectories", "batch", "raw")
MACHINE = "machine "  # prefix of the machine facts in ``run_identity``


def group_runs(runs: Sequence[BenchRun]) -> list[list[BenchRun]]:
    """Group runs with the same model, machine and sampling. A run given twice counts once."""
    groups: dict[str, list[BenchRun]] = {}
    for run in runs:
        group = groups.setdefault(json.dumps(sorted(run_identity(run.manifest).items()), default=str), [])
        if run not in group:
            group.append(run)
    return list(groups.values())


def is_plain(method: Mapping[str, Any]) -> bool:
    """Whether a method of a manifest is plain decoding by this engine."""
    return bool(method.get("kind", DRAFTER) == DRAFTER and method.get("drafter") == PLAIN)


def method_definition(method: Mapping[str, Any]) -> str:
    """Identify a method independent of its label. Plain decoding has no memory and no budget."""
    parts = ("kind", "drafter") if is_plain(method) else ("kind", "drafter", "options", "memory", "budget")
    return json.dumps({part: method.get(part) for part in parts}, sort_keys=True, default=str)


def run_identity(manifest: RunManifest) -> dict[str, str]:
    """Return what distinguishes a run from those it must not be pooled with, by names used in titles."""
    parts: dict[str, Any] = {f"model {name}": manifest.model.get(name) for name in POOLED_MODEL}
    parts |= {MACHINE + name: value for name, value in manifest.machine.items()}
    parts |= {name: manifest.software.get(name) for name in POOLED_SOFTWARE}
    parts |= {name: manifest.settings.get(name) for name in POOLED_SETTINGS}
    return {name: json.dumps(value, sort_keys=True, default=str) for name, value in parts.items()}


def make_titles(manifests: Sequence[RunManifest]) -> list[str]:
    """Make a short title for each; equal titles are followed by the differences."""
    short = [_title(manifest) for manifest in manifests]
    found = []
    for title, manifest in zip(short, manifests, strict=True):
        namesakes = [run_identity(other) for other, same in zip(manifests, short, strict=True) if same == title]
        differences = [
            f", {name} {json.loads(value)}"
            for name, value in run_identity(manifest).items()
            if any(other.get(name) != value for other in namesakes)
        ]
        found.append(title + "".join(differences))
    return found


def _title(manifest: RunManifest) -> str:
    parts = [manifest.model.get("name"), manifest.model.get("dtype"), _device_name(manifest)]
    temperature = manifest.settings.get("temperature")
    named = [str(part) for part in parts if part]
    return ", ".join(named + ([] if temperature is None else [f"temperature {temperature:g}"]))


def _device_name(manifest: RunManifest) -> str:
    """Name the processor, or the GPU of the model by its index, as in cuda:1."""
    device = str(manifest.model.get("device") or "cpu")
    if device == "cpu":
        return str(manifest.machine.get("processor") or device)
    gpus = list(manifest.machine.get("gpus") or ())
    index = device.partition(":")[2]
    number = int(index) if index.isdigit() else 0
    return str(gpus[number]) if number < len(gpus) else device


def merge_manifests(manifests: Sequence[RunManifest]) -> dict[str, Any]:
    """Merge manifests: the first one, with the tasks, failures, absent peers, paper figures and commands of all."""
    merged = asdict(manifests[0])
    for name in ("tasks", "failed", "absent"):
        merged[name] = {key: value for manifest in manifests for key, value in getattr(manifest, name).items()}
    figures = [figure for manifest in manifests for figure in manifest.paper]
    merged["paper"] = [figure for at, figure in enumerate(figures) if figure not in figures[:at]]
    merged["other_load"] = max((m.other_load for m in manifests if m.other_load is not None), default=None)
    merged["finished"] = (
        None if any(m.finished is None for m in manifests) else max(m.finished or "" for m in manifests)
    )
    merged["command"] = "\n".join(dict.fromkeys(manifest.command for manifest in manifests))
    return merged


def list_methods(run: BenchRun) -> list[dict[str, Any]]:
    """List the methods of a run, including those that have records but are missing in the manifest."""
    known = [method["label"] for method in run.manifest.methods]
    unknown = sorted({record.method for record in run.records} - set(known))
    return [*run.manifest.methods, *({"label": label, "kind": DRAFTER, "drafter": label} for label in unknown)]


def merge_methods(runs: Sequence[BenchRun]) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Merge the methods of runs, in order of appearance; return them, and for every run its labels' merged labels.

    If a label means something else in a later run, that run's name is appended to it.
    """
    methods: dict[str, dict[str, Any]] = {}  # by merged label
    known: dict[tuple[str, str], str] = {}  # merged labels by label and definition
    labels: list[dict[str, str]] = []
    for run in runs:
        labels.append({})
        for method in list_methods(run):
            own = str(method["label"])
            key = (own, method_definition(method))
            if key not in known:
                suffix = f" ({run.name})" if own in methods else ""
                while own + suffix in methods:  # runs in different places can have the same name
                    suffix += "'"
                known[key] = own + suffix
                family = str(method.get("family", own.split(" @", 1)[0]))
                methods[own + suffix] = {**method, "label": own + suffix, "family": family + suffix}
            labels[-1][own] = known[key]
    return list(methods.values()), labels
