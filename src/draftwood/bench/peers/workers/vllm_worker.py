"""vLLM as a peer: plain, with n-gram speculation, with suffix decoding, or with the proposer of Draftwood."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwood.bench.peers.workers.protocol import Generate, Message, choose_dtype, peak_bytes, reset_peak, serve
else:  # runs as a script in another Python, without the draftwood package
    from protocol import Generate, Message, choose_dtype, peak_bytes, reset_peak, serve

_DRAFTS = "vllm:spec_decode_num_"
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine in this process: idle when no request runs
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other engines use the same cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def load(model: Message) -> tuple[Generate, Message]:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    vllm: Any = importlib.import_module("vllm")
    dtype = choose_dtype(model)
    speculation = _speculation(model["variant"], model["options"])
    engine = vllm.LLM(
        model=model["folder"],
        dtype=dtype,
        max_model_len=model["max_context"],
        max_num_seqs=1,
        seed=model["seed"],
        enforce_eager=model["device"] == "cpu",  # compiling needs a C++ compiler
        enable_prefix_caching=False,  # no prompt caching between requests
        disable_log_stats=False,  # counts and times
        **({"speculative_config": speculation} if speculation else {}),
    )

    def generate(request: Message) -> Message:
        before = _read_counters(engine)
        params = vllm.SamplingParams(
            max_tokens=request["max_tokens"],
            temperature=request["temperature"],
            top_p=request["top_p"],
            top_k=request["top_k"],
            min_p=request["min_p"],
            ignore_eos=request["ignore_eos"],
            seed=request["seed"] if request["temperature"] else None,
            detokenize=False,
        )
        reset_peak()
        started = time.perf_counter()
        [output] = engine.generate([{"prompt_token_ids": request["prompt_ids"]}], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        [sample] = output.outputs
        token_ids = list(sample.token_ids)
        counts = _subtract_counters(before, _read_counters(engine))
        return {
            "token_ids": token_ids,
            "first_token_seconds": first_token_seconds(output.metrics, seconds),
            "total_seconds": seconds,
            "finish_reason": sample.finish_reason,
            "counts": {**counts, "cycles": max(1, len(token_ids) - counts["accepted"])},
            "peak_bytes": _gpu_peak() if model["device"].startswith("cuda") else peak_bytes(),
        }

    return generate, {"version": vllm.__version__, "dtype": dtype}


def first_token_seconds(metrics: Any, seconds: float) -> float | None:
    """Time to the first token: the total without the time between first and last token."""
    first, last = getattr(metrics, "first_token_ts", None), getattr(metrics, "last_token_ts", None)
    return max(0.0, seconds - (last - first)) if first and last else None


def _speculation(variant: str, options: Message) -> Message | None:
    if variant == "ngram":
        return {
            "method": "ngram",
            "num_speculative_tokens": options["tokens"],
            "prompt_lookup_max": options["ngram"],
            "prompt_lookup_min": min(options["min_ngram"], options["ngram"]),
        }
    if variant == "suffix":
        return {
            "method": "suffix",
            "num_speculative_tokens": options["tokens"],
            "suffix_decoding_max_tree_depth": options["tokens"],
            "suffix_decoding_max_cached_requests": options["cached"],
        }
    if variant == "draftwood":
        # The only worker that needs the package: the one that this file belongs to, after vLLM's own packages.
        sys.path.append(str(Path(__file__).resolve().parents[4]))
        os.environ["DRAFTWOOD_VLLM_MEMORY_TOKENS"] = str(options["memory"])
        return {
            "method": "custom_class",
            "model": "draftwood.vllm.Proposer",
            "num_speculative_tokens": options["tokens"],
        }
    return None


def _read_counters(engine: Any) -> Message:
    """Read the counters: drafts, draft_tokens, accepted_tokens, accepted_tokens_per_pos."""
    found: Message = {}
    for metric in engine.get_metrics():
        if metric.name.startswith(_DRAFTS):
            found[metric.name.removeprefix(_DRAFTS)] = getattr(metric, "values", None) or getattr(metric, "value", 0)
    return found


def _subtract_counters(before: Message, after: Message) -> Message:
    """Subtract counters. By depth only if all drafts had full length: vLLM does not count shorter ones separately."""

    def added(name: str) -> int:
        return int(after.get(name, 0) - before.get(name, 0))

    counts: Message = {"drafted": added("draft_tokens"), "accepted": added("accepted_tokens")}
    per_position = after.get("accepted_tokens_per_pos") or []
    earlier = before.get("accepted_tokens_per_pos") or [0] * len(per_position)
    drafts = added("drafts")
    if drafts and counts["drafted"] == drafts * len(per_position):
        counts["tried_by_depth"] = [drafts] * len(per_position)
        counts["accepted_by_depth"] = [int(new - old) for new, old in zip(per_position, earlier)]  # noqa: B905
    return counts


def _gpu_peak() -> int:
    """Memory reserved by vLLM, which allocates its share at the start."""
    torch: Any = importlib.import_module("torch")
    return int(torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    serve(load)
