"""Compares training-free drafters: tokens per pass by task, and speed-up over plain decoding.

    python benchmarks/training_free.py tau   --data PROMPTS pld recycling goose goose:bypass=copied,extension=levels
    python benchmarks/training_free.py speed --data PROMPTS --budget auto goose
    python benchmarks/training_free.py trajectories --data PROMPTS --tasks gsm8k --samples 1,4,8,16 stand recycling

PROMPTS is a folder of JSON-lines files, one per task (see draftwood.prompts). A method is a drafter name, with options
after a colon, including ``memory=process`` and ``budget=16``. ``tau`` runs prompts in batches, ``speed`` one at a time,
alternating between plain decoding and the methods for each prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftwood import LLM, SamplingParams
from draftwood.cli.options import drafter_options
from draftwood.config import ModelOptions
from draftwood.engine import RequestStats
from draftwood.prompts import prompt_ids, read_prompts
from draftwood.targets.load import Loaded, load_target

TASKS = "humaneval,mbpp,classeval,gsm8k,mt_bench"


class Method(NamedTuple):
    label: str
    drafter: str
    options: dict[str, Any]
    memory: str
    budget: int | str

    def llm(self, loaded: Loaded, batch: int) -> LLM:
        return LLM.from_target(
            loaded.target,
            loaded.codec,
            drafter=self.drafter,
            drafter_options=self.options,
            memory=self.memory,
            budget=self.budget,
            max_batch=batch,
        )


def parse_method(text: str, args: argparse.Namespace) -> Method:
    name, _, rest = text.partition(":")
    options = drafter_options(rest.split(",") if rest else [])
    memory, budget = options.pop("memory", args.memory), options.pop("budget", args.budget)
    return Method(text, name, options, memory, budget)


def load_prompts(args: argparse.Namespace, loaded: Loaded) -> dict[str, list[list[int]]]:
    tasks = {}
    for task in args.tasks.split(","):
        conversations = read_prompts(Path(args.data) / f"{task}.jsonl", args.prompts)
        tasks[task] = [prompt_ids(loaded.codec, conversation) for conversation in conversations]
    return tasks


def params_of(args: argparse.Namespace, **more: Any) -> SamplingParams:
    seed = args.seed if args.temperature else None
    return SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=seed, **more)


def summary(stats: Sequence[RequestStats]) -> dict[str, float]:
    """Compute means over prompts, and totals over all cycles."""
    cycles = sum(s.cycles for s in stats)
    tried: Counter[str] = sum((s.tried_by_source for s in stats), Counter())
    accepted: Counter[str] = sum((s.accepted_by_source for s in stats), Counter())
    return {
        "tau": statistics.mean(s.acceptance_length for s in stats),
        "nodes": sum(s.drafted_nodes for s in stats) / cycles + 1,
        "draft_ms": 1e3 * sum(s.draft_seconds for s in stats) / cycles,
        "accept_ms": 1e3 * sum(s.accept_seconds for s in stats) / cycles,
        **{f"p_{source}": accepted[source] / count for source, count in tried.items()},
    }


def row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"


def tau(args: argparse.Namespace, loaded: Loaded, methods: Sequence[Method]) -> list[dict[str, Any]]:
    tasks = load_prompts(args, loaded)
    print(row(["method", "B", *tasks, "mean", "nodes", "p_s", "p_t", "routes"]))
    print(row(["---"] * (len(tasks) + 7)))
    results = []
    for method in methods:
        llm = method.llm(loaded, args.batch)
        everything: list[RequestStats] = []
        means = {}
        for task, prompts in tasks.items():
            stats = [completion.stats for completion in llm.generate(prompts, params_of(args))]
            means[task] = statistics.mean(s.acceptance_length for s in stats)
            everything += stats
        whole = summary(everything)
        routes: Counter[str] = sum((s.routes for s in everything), Counter())
        total = sum(routes.values())
        shares = " ".join(f"{name} {count / total:.0%}" for name, count in routes.most_common())
        mean = statistics.mean(means.values())
        rates = [whole.get("p_context", float("nan")), whole.get("p_transition", float("nan"))]
        print(row([method.label, method.budget, *means.values(), mean, whole["nodes"], *rates, shares]), flush=True)
        results.append({"method": method.label, "tau": means, "mean": mean, "routes": dict(routes), **whole})
    return results


def speed(args: argparse.Namespace, loaded: Loaded, methods: Sequence[Method]) -> list[dict[str, Any]]:
    """Speed-up over plain decoding of the same prompt, without prefill, measured right after it."""
    tasks = load_prompts(args, loaded)
    plain = Method("plain", "plain", {}, "request", 1).llm(loaded, 1)
    llms = [method.llm(loaded, 1) for method in methods]
    warm = next(iter(tasks.values()))[0]
    for llm in [plain, *llms]:
        llm.generate([list(reversed(warm))], SamplingParams(max_tokens=16))
    print(row(["method", *tasks, "mean", "tau", "nodes", "draft ms", "accept ms", "plain tokens/s"]))
    print(row(["---"] * (len(tasks) + 7)))
    ratios: dict[str, dict[str, list[float]]] = {m.label: {task: [] for task in tasks} for m in methods}
    stats: dict[str, list[RequestStats]] = {m.label: [] for m in methods}
    plain_rates = []
    for task, prompts in tasks.items():
        for prompt in prompts:
            base = plain.generate([prompt], params_of(args))[0]
            runs = [llm.generate([prompt], params_of(args))[0] for llm in llms]
            again = plain.generate([prompt], params_of(args))[0]
            rate = max(base.stats.tokens_per_second, again.stats.tokens_per_second)
            plain_rates.append(rate)
            for method, run in zip(methods, runs, strict=True):
                assert args.temperature or run.token_ids == base.token_ids, f"{method.label} differs on {task}"
                ratios[method.label][task].append(run.stats.tokens_per_second / rate)
                stats[method.label].append(run.stats)
    results = []
    for method in methods:
        means = {task: statistics.mean(values) for task, values in ratios[method.label].items()}
        whole = summary(stats[method.label])
        cells = [*means.values(), statistics.mean(means.values()), whole["tau"], whole["nodes"]]
        label = f"{method.label}, budget {method.budget}"
        print(row([label, *cells, whole["draft_ms"], whole["accept_ms"], statistics.median(plain_rates)]), flush=True)
        results.append({"method": label, "speedup": means, **whole})
    return results


def trajectories(args: argparse.Namespace, loaded: Loaded, methods: Sequence[Method]) -> list[dict[str, Any]]:
    """Tokens per pass over the first 1, 4, ... samples of a prompt, which share a memory.

    With ``--batch 1`` samples run in sequence, as in STAND's paper.
    """
    tasks = load_prompts(args, loaded)
    counts = [int(count) for count in args.samples.split(",")]
    print(row(["method", "B", *(f"{task}, {count}" for task in tasks for count in counts)]))
    print(row(["---"] * (2 + len(tasks) * len(counts))))
    results = []
    for method in methods:
        cells: list[float] = []
        for prompts in tasks.values():
            by_prompt = [_samples(method.llm(loaded, args.batch), prompt, args, max(counts)) for prompt in prompts]
            for count in counts:
                taken = [s for samples in by_prompt for s in samples[:count]]
                cells.append(sum(s.output_tokens for s in taken) / sum(s.cycles for s in taken))
        print(row([method.label, method.budget, *cells]), flush=True)
        results.append({"method": method.label, "tau": cells})
    return results


def _samples(llm: LLM, prompt: list[int], args: argparse.Namespace, count: int) -> list[RequestStats]:
    return [completion.stats for completion in llm.generate([prompt], params_of(args, n=count))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tau", "speed", "trajectories"))
    parser.add_argument("methods", nargs="+", metavar="METHOD")
    parser.add_argument("--data", required=True, help="folder of prompt files")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--prompts", type=int, default=5, help="prompts per task")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", default="1,4,8,16")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budget", type=lambda text: text if text == "auto" else int(text), default=60)
    parser.add_argument("--memory", default="prompt")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", metavar="FILE", help="write the figures to a JSON file")
    args = parser.parse_args()
    batch = 1 if args.what == "speed" else args.batch
    loaded = load_target(
        ModelOptions(model=args.model, dtype=args.dtype, device=args.device, max_batch=batch, cache_tokens=4096 * batch)
    )
    started = time.perf_counter()
    run = {"tau": tau, "speed": speed, "trajectories": trajectories}[args.what]
    results = run(args, loaded, [parse_method(text, args) for text in args.methods])
    info = loaded.target.info
    print(f"\n{info.name}, {info.backend}, {info.dtype}, {info.device}; {time.perf_counter() - started:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
