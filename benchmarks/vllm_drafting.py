"""Our proposer inside vLLM, beside vLLM without speculation and with its own n-gram and suffix methods.

    draftwood bench peers --install vllm
    python benchmarks/vllm_drafting.py --data PROMPTS --limit 32 --batch 8 --out vllm-drafting.json

``PROMPTS`` is a folder with one file of prompts per task. Every engine runs in a process of its own, with the same
number of threads, and sees every prompt once: all of a task together, of which ``--batch`` run at a time. The engines
take turns of a few seconds, so that a machine that is slow at times is slow for all of them.

Reported per task: whether the outputs equal those without speculation, accepted tokens per drafted one, tokens per pass
and request, and tokens per second relative to vLLM without speculation, by the clock and by CPU time. The exit code is
1 if an output of our proposer differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
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
WARM_UP = list(range(100, 140))  # tokens of no prompt
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
            "speculation": VARIANTS[variant], "repair": args.temperature > 0.0,
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

    def begin(self, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> None:
        self._request = {"prompts": prompts, "max_tokens": args.max_tokens, "temperature": args.temperature}
        self.texts: list[list[int]] | None = None
        self.totals: Counter[str] = Counter()

    def take_turn(self, seconds: float) -> None:
        """Go on with the requests; ``texts`` are there when all have ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**self._request, "turn": seconds}) + "\n")
        self._process.stdin.flush()
        self._request = {}
        answer = self._read()["answer"]
        self.texts = answer.pop("texts")
        if (threads := answer.pop("threads")) != self._threads:
            raise SystemExit(f"vLLM with {self.variant} used {threads} threads")
        self.totals.update(answer)

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


def run(engines: Sequence[Engine], prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Figures by variant."""
    for engine in engines:
        engine.begin(prompts, args)
    while running := [engine for engine in engines if engine.texts is None]:
        for engine in running:
            engine.take_turn(args.turn)
    expected = engines[0].texts
    assert expected is not None
    tokens = sum(map(len, expected))
    figures = {}
    for engine in engines:
        found = engine.totals
        texts = engine.texts or []
        figures[engine.variant] = {
            "prompts": len(prompts),
            "equal": sum(a == b for a, b in zip(expected, texts, strict=True)),
            "tokens": tokens,
            "accepted": found["accepted_tokens"],
            "drafted": found["draft_tokens"],
            "tokens_per_pass": tokens / max(tokens - found["accepted_tokens"], 1),
            "seconds": found["seconds"],
            "cpu_seconds": found["cpu_seconds"],
        }
    return figures


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
    variants = dict.fromkeys(["plain", *args.variants.split(",")])
    engines = [Engine(variant, args, model) for variant in variants]
    print(f"vLLM {engines[0].version}", file=sys.stderr)
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    try:
        run(engines, [WARM_UP], args)
        for task, own in prompts.items():
            print(f"{task}: {len(own)} prompts", file=sys.stderr)
            figures[task] = run(engines, own, args)
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
    parser.add_argument("--turn", type=float, default=4.0, metavar="SECONDS", help="of an engine (default: 4)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each engine (default: 1)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0")
    parser.add_argument("--model", default="smollm2", help="default: smollm2")
    parser.add_argument("--dtype", default="float32", help="default: float32")
    parser.add_argument("--out", type=Path, default=Path("vllm-drafting.json"), help="figures; logs beside it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
