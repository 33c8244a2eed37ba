"""Our proposer inside vLLM, beside vLLM without speculation and with its own n-gram and suffix methods.

    draftwood bench peers --install vllm
    python benchmarks/vllm_drafting.py --data PROMPTS --limit 32 --batch 8 --out vllm-drafting.json

``PROMPTS`` is a folder with one file of prompts per task. Every engine runs in a process of its own, with the same
number of threads. They take turns, task by task in a changing order, and see every prompt once: all of a task together,
of which ``--batch`` run at a time. Reported per task: whether the outputs equal those without speculation,
accepted tokens per drafted one, tokens per pass and request, and tokens per second relative to vLLM without
speculation, by the clock and by CPU time. The exit code is 1 if an output of our proposer differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import draftwood
from draftwood.bench.peers import find_peer
from draftwood.bench.peers.environments import clean_environment, find_python
from draftwood.models.find import expand, resolve
from draftwood.prompts import prompt_ids, read_prompts
from draftwood.text import Tokenizer

WORKER = Path(__file__).with_name("vllm_drafting_worker.py")
MARGIN = 64
TASKS = ("humaneval", "mbpp", "classeval", "gsm8k", "mt_bench", "cnn_dm")
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix", "num_speculative_tokens": 16},
    "draftwood": {"method": "custom_class", "model": "draftwood.vllm.Proposer", "num_speculative_tokens": 16},
}


class Engine:
    """One worker process."""

    def __init__(self, variant: str, args: argparse.Namespace, model: Path) -> None:
        given = {
            "model": str(model), "dtype": args.dtype, "max_context": args.max_context, "batch": args.batch,
            "speculation": VARIANTS[variant],
        }  # fmt: skip
        source = str(Path(draftwood.__file__).parents[1])
        threads = str(args.threads)
        environment = {**clean_environment(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads}
        environment["NUMBA_NUM_THREADS"] = threads  # ngram runs numba, which sets the threads of torch too
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), source)))
        self.variant, self._threads = variant, args.threads
        self._log = Path(f"{args.out}.{variant}.log").open("wb")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [str(find_python(find_peer("vllm"))), str(WORKER), json.dumps(given)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment,
        )  # fmt: skip
        self.version = self._read()["ready"]

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        request = {"prompts": prompts, "max_tokens": max_tokens, "temperature": temperature}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = dict(self._read()["answer"])
        if answer["threads"] != self._threads:
            raise SystemExit(f"vLLM with {self.variant} used {answer['threads']} threads")
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(('{"ready"', '{"answer"')):
                return dict(json.loads(line))
        raise SystemExit(f"vLLM with {self.variant} ended: see {self._log.name}")


def load_prompts(args: argparse.Namespace, model: Path) -> dict[str, list[list[int]]]:
    codec = Tokenizer.from_folder(model)
    # Where a text comes near the end of the context, vLLM drafts zeros for all requests of the batch.
    room = args.max_context - args.max_tokens - MARGIN
    found = {}
    for task in args.tasks.split(","):
        prompts = read_prompts(args.data / f"{task}.jsonl")
        ids = [list(prompt_ids(codec, prompt)) for prompt in prompts]
        found[task] = [one for one in ids if len(one) <= room][: args.limit]
    return found


def summarize(answer: dict[str, Any]) -> dict[str, Any]:
    tokens, accepted = sum(map(len, answer["texts"])), answer.get("accepted_tokens", 0)
    return {
        "texts": answer["texts"],
        "tokens": tokens,
        "accepted": accepted,
        "drafted": answer.get("draft_tokens", 0),
        "tokens_per_pass": tokens / max(tokens - accepted, 1),
        "seconds": answer["seconds"],
        "cpu_seconds": answer["cpu_seconds"],
    }


def show(figures: dict[str, dict[str, dict[str, Any]]]) -> None:
    print("| task | engine | equal | accepted of drafted | tokens a pass | speed | speed, CPU time |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for task, by_variant in figures.items():
        plain = by_variant["plain"]
        for variant, own in by_variant.items():
            share = f"{own['accepted']} of {own['drafted']} ({own['accepted'] / max(own['drafted'], 1):.0%})"
            speeds = [own["tokens"] / own[key] / (plain["tokens"] / plain[key]) for key in ("seconds", "cpu_seconds")]
            print(
                f"| {task} | {variant} | {own['equal']} of {own['prompts']} | {share} | {own['tokens_per_pass']:.2f} | "
                f"{speeds[0]:.2f}x | {speeds[1]:.2f}x |"
            )


def main() -> int:
    args = parse_arguments()
    model = resolve(args.model).path
    expand(model)
    prompts = load_prompts(args, model)
    engines = [Engine(variant, args, model) for variant in args.variants.split(",")]
    print(f"vLLM {engines[0].version}", file=sys.stderr)
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    try:
        for engine in engines:
            engine.run([next(iter(prompts.values()))[0]], 4, 0.0)
        for number, (task, own) in enumerate(prompts.items()):
            totals: dict[str, dict[str, Any]] = {engine.variant: {} for engine in engines}
            for turn in range(len(engines)):
                engine = engines[(number + turn) % len(engines)]
                print(f"{task}: {len(own)} prompts, {engine.variant}", file=sys.stderr)
                totals[engine.variant] = summarize(engine.run(own, args.max_tokens, args.temperature))
            expected = totals["plain"].pop("texts")
            for total in totals.values():
                texts = total.pop("texts", expected)
                total |= {"prompts": len(own), "equal": sum(a == b for a, b in zip(expected, texts, strict=True))}
            figures[task] = totals
            args.out.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    finally:
        for engine in engines:
            engine.close()
    show(figures)
    ours = [own["draftwood"] for own in figures.values() if "draftwood" in own]
    return int(args.temperature == 0.0 and any(own["equal"] < own["prompts"] for own in ours))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="task files, TASK.jsonl")
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"default: {','.join(TASKS)}")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"default: {','.join(VARIANTS)}")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each task (default: 8)")
    parser.add_argument("--max-tokens", type=int, default=96, help="default: 96")
    parser.add_argument("--max-context", type=int, default=1088, help="default: 1088")
    parser.add_argument("--batch", type=int, default=8, help="requests that run together (default: 8)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each engine (default: 1)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0")
    parser.add_argument("--model", default="smollm2", help="default: smollm2")
    parser.add_argument("--dtype", default="float32", help="default: float32")
    parser.add_argument("--out", type=Path, default=Path("vllm-drafting.json"), help="figures; logs beside it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
