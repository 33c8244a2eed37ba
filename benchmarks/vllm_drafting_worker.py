"""The part of vllm_drafting.py that runs in vLLM's Python: one engine with one way of drafting.

    python vllm_drafting_worker.py '{"model": ..., "dtype": "float32", "max_context": 1088, "batch": 8,
                                     "speculation": {...}, "tokenizer": true, "repair": false}'

Reads one JSON object per line, ``{"prompts": [[ids]], "max_tokens": 96, "temperature": 0}``, and writes one per line,
after ``{"ready": VERSION}``. With ``"turn": SECONDS`` it stops after that time, even between two tokens of a request;
``{"turn": SECONDS}`` goes on. ``"texts"`` of an answer is null until all requests have ended. Other lines are output of
the engine.
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


def repair_sampling(torch: Any) -> None:
    """Make sampled requests right on CPUs, where vLLM 0.32 leaves the temperatures of guesses uninitialised.

    Its ``_expand_kernel_impl`` writes to a copy, and rounds. This is so for all ways of drafting.
    """
    sampler: Any = importlib.import_module("vllm.v1.sample.rejection_sampler")

    def expand(values: Any, ends: Any, _count: int, replace_from: float = 0, replace_to: float = 0) -> Any:
        replaced = torch.where(values == replace_from, replace_to, values)
        return replaced.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1)))

    sampler.expand_batch_to_tokens = expand


class Requests:
    """Requests that were added together."""

    def __init__(self, vllm: Any, engine: Any) -> None:
        self._vllm, self._engine = vllm, engine.llm_engine
        self._texts: dict[str, list[int] | None] = {}

    def add(self, message: dict[str, Any]) -> None:
        params = self._vllm.SamplingParams(
            max_tokens=message["max_tokens"], temperature=message["temperature"], detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        self._texts = {str(number): None for number in range(len(message["prompts"]))}
        for name, ids in zip(self._texts, message["prompts"]):  # noqa: B905
            self._engine.add_request(name, {"prompt_token_ids": ids}, params)

    def run(self, seconds: float | None) -> list[list[int] | None] | None:
        """The texts, if all have ended within the time."""
        end = time.perf_counter() + seconds if seconds else float("inf")
        while self._engine.has_unfinished_requests():
            if time.perf_counter() >= end:
                return None
            for done in self._engine.step():
                self._texts[done.request_id] = list(done.outputs[0].token_ids)
        return list(self._texts.values())


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
        skip_tokenizer_init=not given.get("tokenizer", True),
        **({"speculative_config": given["speculation"]} if given["speculation"] else {}),
    )
    if given.get("repair"):
        repair_sampling(torch)
    say(ready=vllm.__version__)
    requests = Requests(vllm, engine)
    for line in sys.stdin:
        message = json.loads(line)
        before, wall, cpu = counters(engine), time.perf_counter(), time.process_time()
        if "prompts" in message:
            requests.add(message)
        texts = requests.run(message.get("turn"))
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        counts = {name: value - before.get(name, 0) for name, value in counters(engine).items()}
        threads = torch.get_num_threads()
        say(answer={"texts": texts, "seconds": seconds, "cpu_seconds": cpu_seconds, "threads": threads, **counts})


if __name__ == "__main__":
    main()
