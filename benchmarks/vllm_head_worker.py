"""The part of vllm_head.py that runs in vLLM's Python, without the draftwood package.

    python vllm_head_worker.py REQUEST.json

Writes one JSON object per line to stdout: ``{"progress": [label, done, total]}`` during the run, ``{"answer": ...}`` at
the end. Other lines are output of the engine.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

COUNTERS = "vllm:spec_decode_num_"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, so that errors are raised here
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def say(**content: Any) -> None:
    print(json.dumps(content), flush=True)


def start(vllm: Any, request: dict[str, Any]) -> Any:
    return vllm.LLM(
        model=request["model"],
        dtype=request["dtype"],
        max_model_len=request["max_context"],
        max_num_seqs=request["batch"],
        enforce_eager=True,
        enable_prefix_caching=False,  # no prompt caching between requests
        async_scheduling=False,  # no drafts for finished requests
        disable_log_stats=False,  # enables counters
        seed=0,
        speculative_config={
            "method": "eagle3",
            "model": request["head"],
            "num_speculative_tokens": request["draft_tokens"],
        },
    )


def counters(engine: Any) -> dict[str, Any]:
    """Read the draft counters: ``drafts``, ``draft_tokens``, ``accepted_tokens_per_pos``."""
    found = {}
    for metric in engine.get_metrics():
        if metric.name.startswith(COUNTERS):
            values = getattr(metric, "values", None)
            found[metric.name.removeprefix(COUNTERS)] = metric.value if values is None else list(values)
    return found


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    say(progress=["starting vLLM", 0, 1])
    vllm: Any = importlib.import_module("vllm")
    engine = start(vllm, request)
    say(progress=["starting vLLM", 1, 1])
    params = vllm.SamplingParams(max_tokens=request["max_tokens"], temperature=0.0, detokenize=False)
    prompts, texts = request["prompts"], []
    for first in range(0, len(prompts), request["batch"]):
        say(progress=["vLLM", first, len(prompts)])
        batch = [{"prompt_token_ids": ids} for ids in prompts[first : first + request["batch"]]]
        texts += [list(done.outputs[0].token_ids) for done in engine.generate(batch, params, use_tqdm=False)]
    say(progress=["vLLM", len(prompts), len(prompts)])
    say(answer={"version": vllm.__version__, "texts": texts, **counters(engine)})


if __name__ == "__main__":
    main()
