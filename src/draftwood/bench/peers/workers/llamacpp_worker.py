"""llama.cpp as a peer, through the server in the ``xllamacpp`` wheel: plain, or with n-gram lookup."""

from __future__ import annotations

import http.client
import importlib
import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwood.bench.peers.workers.protocol import Generate, Message, peak_bytes, reset_peak, serve
else:  # runs as a script in another Python, without the draftwood package
    from protocol import Generate, Message, peak_bytes, reset_peak, serve

_SETTINGS = {
    "ngram-simple": "ngram_simple",
    "ngram-map-k": "ngram_map_k",
    "ngram-map-k4v": "ngram_map_k4v",
}  # kinds with n-gram and draft lengths; the others have their own settings


def load(model: Message) -> tuple[Generate, Message]:
    xllamacpp: Any = importlib.import_module("xllamacpp")

    params = xllamacpp.CommonParams()
    params.model.path = model["gguf"]
    params.n_ctx = model["max_context"]
    params.n_parallel = 1
    params.cache_ram_mib = 0  # no prompt caching between requests
    params.verbosity = 1  # errors
    if model["device"] == "cpu":
        params.n_gpu_layers = 0
    elif not any("GPU" in str(device["type"]) for device in xllamacpp.get_device_info()):
        raise RuntimeError("this build of xllamacpp has no GPU support")
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads = model["threads"]
    if model["variant"] == "lookup":
        _configure_lookup(xllamacpp, params, model["options"])
    server = xllamacpp.Server(params)

    def generate(request: Message) -> Message:
        reset_peak()
        started = time.perf_counter()
        answer = _post(server.listening_address, "/completion", _build_request(request))
        seconds = time.perf_counter() - started
        timings = answer["timings"]
        token_ids = answer["tokens"]
        accepted = timings.get("draft_n_accepted", 0)
        return {
            "token_ids": token_ids,
            "first_token_seconds": max(0.0, seconds - timings["predicted_ms"] / 1000),
            "total_seconds": seconds,
            "finish_reason": "length" if answer["stop_type"] == "limit" else "stop",
            "counts": {
                "cycles": max(1, len(token_ids) - accepted),
                "drafted": timings.get("draft_n", 0),
                "accepted": accepted,
            },
            "peak_bytes": peak_bytes(),
        }

    return generate, {"version": xllamacpp.__version__, "dtype": "gguf"}


def _configure_lookup(xllamacpp: Any, params: Any, options: Message) -> None:
    kind = str(options["kind"])
    name = "COMMON_SPECULATIVE_TYPE_" + kind.upper().replace("-", "_")
    params.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
    if kind in _SETTINGS:
        settings = getattr(params.speculative, _SETTINGS[kind])
        settings.size_n, settings.size_m = options["ngram"], options["tokens"]


def _build_request(request: Message) -> Message:
    """Build the server request; samplers in the order of transformers, and no others."""
    common = {
        "prompt": request["prompt_ids"],
        "n_predict": request["max_tokens"],
        "ignore_eos": request["ignore_eos"],
        "seed": request["seed"],
        "cache_prompt": False,
        "return_tokens": True,
    }
    if request["temperature"] == 0.0:
        return {**common, "samplers": ["top_k"], "top_k": 1}
    chosen = {name: request[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    return {**common, **chosen, "samplers": ["temperature", "top_k", "top_p", "min_p"]}


def _post(address: str, path: str, content: Message) -> Message:
    """Post to the server in this process; only its HTTP API returns token ids."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    try:
        connection.request("POST", path, json.dumps(content), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(answer.get("error", {}).get("message") or f"status {response.status}")
    return dict(answer)


if __name__ == "__main__":
    serve(load)
