"""The part of vllm_drafting.py that runs in vLLM's Python: one engine with one way of drafting.

    python vllm_drafting_worker.py '{"model": ..., "batch": 8, "speculation": {...}}'

Reads one JSON object per line, ``{"prompts": [[ids]], "max_tokens": 96}``, and writes one per line, after ``{"ready":
VERSION}``. Other lines are output of the engine.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

COUNTERS = "vllm:spec_decode_num_"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, whose time is measured
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def say(**content: Any) -> None:
    print(json.dumps(content), flush=True)


def counters(engine: Any) -> dict[str, int]:
    names = {f"{COUNTERS}{name}": name for name in ("drafts", "draft_tokens", "accepted_tokens")}
    return {names[metric.name]: int(metric.value) for metric in engine.get_metrics() if metric.name in names}


def main() -> None:
    given = json.loads(sys.argv[1])
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    vllm: Any = importlib.import_module("vllm")
    torch: Any = importlib.import_module("torch")
    engine = vllm.LLM(
        model=given["model"],
        dtype=given["dtype"],
        max_model_len=given["max_context"],
        max_num_seqs=given["batch"],
        enforce_eager=True,
        enable_prefix_caching=False,  # no prompt caching between rounds
        async_scheduling=False,
        disable_log_stats=False,  # enables counters
        seed=0,
        **({"speculative_config": given["speculation"]} if given["speculation"] else {}),
    )
    say(ready=vllm.__version__)
    for line in sys.stdin:
        request = json.loads(line)
        params = vllm.SamplingParams(
            max_tokens=request["max_tokens"], temperature=request["temperature"], seed=0, detokenize=False
        )
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        before, wall, cpu = counters(engine), time.perf_counter(), time.process_time()
        done = engine.generate(prompts, params, use_tqdm=False)
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        counts = {name: value - before.get(name, 0) for name, value in counters(engine).items()}
        texts = [list(one.outputs[0].token_ids) for one in done]
        threads = torch.get_num_threads()
        say(answer={"texts": texts, "seconds": seconds, "cpu_seconds": cpu_seconds, "threads": threads, **counts})


if __name__ == "__main__":
    main()
