"""The workers of peers, with fake engines, with transformers, and with other engines if installed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from draftwood.bench.peers import ENGINES, Peer, PeerModel, PeerSpec, environments, explain_absence, find_peer
from draftwood.bench.peers.messages import decode_result, encode_request
from draftwood.bench.peers.specs import WORKERS
from draftwood.config import SamplingParams
from draftwood.errors import DraftwoodError
from tests.conftest import threads
from tests.tools.gguf_writer import write_toy


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import workers by their own names, as in their own process, where they set the number of threads."""
    monkeypatch.syspath_prepend(str(WORKERS))
    with threads(torch.get_num_threads()):
        yield
    for name in ("protocol", "transformers_worker", "llamacpp_worker", "vllm_worker"):
        sys.modules.pop(name, None)


def told(folder: Path | str = "folder", variant: str = "", **more: Any) -> dict[str, Any]:
    plain = {"folder": str(folder), "variant": variant, "options": {}, "dtype": "float32", "dtype_is_free": True}
    return {**plain, "device": "cpu", "threads": 1, "max_context": 64, "seed": 0, **more}


def test_cpu_without_bfloat16_uses_float32(workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    protocol: Any = importlib.import_module("protocol")
    free, fixed = told(dtype="bfloat16"), told(dtype="bfloat16", dtype_is_free=False)
    for flags, dtype in (
        ({"fp", "asimd"}, "float32"),
        ({"bf16"}, "bfloat16"),
        ({"amx_bf16"}, "bfloat16"),
        (None, "bfloat16"),
    ):
        monkeypatch.setattr(protocol, "cpu_flags", lambda flags=flags: flags)
        assert protocol.choose_dtype(free) == dtype
        assert protocol.choose_dtype(fixed) == "bfloat16"
        assert protocol.choose_dtype({**free, "device": "cuda"}) == "bfloat16"


def test_counts_are_computed_from_passes_and_tokens(workers: None) -> None:
    watch = importlib.import_module("transformers_worker").PassCounter()
    watch.positions = [12, 4, 1, 3]  # a prompt of 10 with two guesses, then three guesses, none, two
    watch.emitted = [1, 4, 1, 2]
    assert watch.counts(10) == {
        "cycles": 4,
        "drafted": 7,
        "accepted": 4,
        "tried_by_depth": [3, 3, 1],
        "accepted_by_depth": [2, 1, 1],
    }
    watch.emitted = [8]
    assert watch.counts(10) == {"cycles": 4}


def test_llama_request_uses_our_sampling_order(workers: None) -> None:
    worker: Any = importlib.import_module("llamacpp_worker")
    asked = worker._build_request(encode_request([1, 2], SamplingParams(max_tokens=5), seed=3))
    assert (asked["prompt"], asked["n_predict"], asked["samplers"], asked["top_k"]) == ([1, 2], 5, ["top_k"], 1)
    asked = worker._build_request(encode_request([1], SamplingParams(temperature=0.7, top_p=0.9), seed=3))
    assert asked["samplers"] == ["temperature", "top_k", "top_p", "min_p"]
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["seed"]) == (0.7, 0.9, 0, 3)


def test_llama_timings_are_converted(workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Any = importlib.import_module("llamacpp_worker")
    given: list[Any] = []
    kinds = SimpleNamespace(COMMON_SPECULATIVE_TYPE_NGRAM_MAP_K="map-k")

    class Params(SimpleNamespace):
        def __init__(self) -> None:
            places = SimpleNamespace(ngram_map_k=SimpleNamespace())
            super().__init__(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace())
            self.speculative = places
            given.append(self)

    server = SimpleNamespace(listening_address="http://127.0.0.1:1")
    module = SimpleNamespace(
        CommonParams=Params, Server=lambda params: server, common_speculative_type=kinds, __version__="1"
    )
    monkeypatch.setitem(sys.modules, "xllamacpp", module)
    timings = {"predicted_ms": 0.0, "draft_n": 5, "draft_n_accepted": 2}
    answer = {"tokens": [4, 5, 6], "timings": timings, "stop_type": "eos"}
    monkeypatch.setattr(worker, "_post", lambda address, path, content: answer)
    options = {"kind": "ngram-map-k", "ngram": 4, "tokens": 7}
    generate, facts = worker.load(told(variant="lookup", gguf="x.gguf", options=options, threads=3))
    [params] = given
    assert params.speculative.types == ["map-k"]
    assert (params.speculative.ngram_map_k.size_n, params.speculative.ngram_map_k.size_m) == (4, 7)
    assert (params.model.path, params.cpuparams.n_threads, params.n_gpu_layers) == ("x.gguf", 3, 0)
    found = generate(encode_request([1], SamplingParams(), seed=0))
    assert found["counts"] == {"cycles": 1, "drafted": 5, "accepted": 2}
    assert found["finish_reason"] == "stop"
    assert found["first_token_seconds"] == found["total_seconds"]
    assert facts["version"] == "1"
    module.get_device_info = lambda: [{"type": "GGML_BACKEND_DEVICE_TYPE_CPU"}]
    with pytest.raises(RuntimeError, match="has no GPU support"):
        worker.load(told(gguf="x.gguf", device="cuda"))
    module.get_device_info = lambda: [{"type": "GGML_BACKEND_DEVICE_TYPE_GPU"}]
    worker.load(told(gguf="x.gguf", device="cuda"))
    assert not hasattr(given[-1], "n_gpu_layers")  # as many as fit


class StandInVllm(ModuleType):
    """Responds like vLLM: two drafts of three tokens per request, with counters that continue across requests."""

    __version__ = "0"

    def __init__(self) -> None:
        super().__init__("vllm")
        self.given: dict[str, Any] = {}
        self.asked: list[Any] = []
        self.per_draft = 3

    def LLM(self, **given: Any) -> StandInVllm:  # noqa: N802
        self.given = given
        return self

    def SamplingParams(self, **params: Any) -> dict[str, Any]:  # noqa: N802
        return params

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        self.asked.append((prompts, params))
        sample = SimpleNamespace(token_ids=(7, 8, 9, 2), finish_reason="stop")
        return [SimpleNamespace(outputs=[sample], metrics=SimpleNamespace(first_token_ts=10.0, last_token_ts=10.0))]

    def get_metrics(self) -> list[Any]:
        times = len(self.asked)
        prefix = "vllm:spec_decode_num_"
        return [
            SimpleNamespace(name="vllm:other", value=5),
            SimpleNamespace(name=f"{prefix}drafts", value=2 * times),
            SimpleNamespace(name=f"{prefix}draft_tokens", value=2 * self.per_draft * times),
            SimpleNamespace(name=f"{prefix}accepted_tokens", value=2 * times),
            SimpleNamespace(name=f"{prefix}accepted_tokens_per_pos", values=[2 * times, 0, 0]),
        ]


@pytest.mark.parametrize("per_draft", [3, 2])
def test_vllm_counters_are_split_by_request(workers: None, monkeypatch: pytest.MonkeyPatch, per_draft: int) -> None:
    module = StandInVllm()
    module.per_draft = per_draft
    monkeypatch.setitem(sys.modules, "vllm", module)
    worker: Any = importlib.import_module("vllm_worker")
    for name in worker._ENVIRONMENT:
        monkeypatch.setenv(name, os.environ.get(name, ""))  # restored afterwards
    options = {"tokens": 3, "ngram": 4, "min_ngram": 2}
    generate, facts = worker.load(told(variant="ngram", options=options))
    assert module.given["speculative_config"]["num_speculative_tokens"] == 3
    assert (module.given["enforce_eager"], module.given["enable_prefix_caching"]) == (True, False)
    assert facts == {"version": "0", "dtype": "float32"}
    generate(encode_request([1], SamplingParams(), seed=0))
    found = generate(encode_request([1, 5], SamplingParams(temperature=0.5, seed=8), seed=0))
    assert module.asked[1][0] == [{"prompt_token_ids": [1, 5]}]
    assert module.asked[1][1]["seed"] == 8
    assert found["token_ids"] == [7, 8, 9, 2]
    assert found["first_token_seconds"] == found["total_seconds"]
    counts = found["counts"]
    assert (counts["cycles"], counts["drafted"], counts["accepted"]) == (2, 2 * per_draft, 2)
    if per_draft == 3:
        assert (counts["tried_by_depth"], counts["accepted_by_depth"]) == ([2, 2, 2], [2, 0, 0])
    else:
        assert "tried_by_depth" not in counts  # drafts were shorter, and it is unknown which


def test_vllm_gets_speculative_config_only_if_requested(workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = StandInVllm()
    monkeypatch.setitem(sys.modules, "vllm", module)
    worker: Any = importlib.import_module("vllm_worker")
    for name in worker._ENVIRONMENT:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    worker.load(told())
    assert "speculative_config" not in module.given
    worker.load(told(variant="suffix", options={"tokens": 24, "cached": 0}))
    assert module.given["speculative_config"]["suffix_decoding_max_cached_requests"] == 0
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("DRAFTWOOD_VLLM_MEMORY_TOKENS", "")
    worker.load(told(variant="draftwood", options={"tokens": 9, "memory": 7}))
    assert module.given["speculative_config"]["model"] == "draftwood.vllm.Proposer"
    assert module.given["speculative_config"]["num_speculative_tokens"] == 9
    assert os.environ["DRAFTWOOD_VLLM_MEMORY_TOKENS"] == "7"
    assert Path(sys.path[-1], "draftwood", "vllm", "__init__.py").is_file()


# The real transformers

PROMPT = [3, 9, 4, 9, 4, 9, 11, 5]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a random model, and the model."""
    pytest.importorskip("transformers", reason="the peer transformers needs the extra 'hf'")
    from tests.tools.hf import CONFIGS, build

    built = build(CONFIGS["llama"]())
    folder = tmp_path_factory.mktemp("tiny")
    built.generation_config.eos_token_id = [2, 65]
    built.save_pretrained(folder)
    return folder, built


def directly(tiny: tuple[Path, Any], **more: Any) -> list[int]:
    torch.manual_seed(6)
    prompt = torch.tensor([PROMPT])
    with torch.inference_mode():
        output = tiny[1].generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **more)
    return output[0, len(PROMPT) :].tolist()


def test_transformers_gives_the_tokens_of_generate(workers: None, tiny: tuple[Path, Any]) -> None:
    worker: Any = importlib.import_module("transformers_worker")
    generate, facts = worker.load(told(tiny[0]))
    assert facts["dtype"] == "float32"
    asked = encode_request(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True), seed=0)
    greedy = decode_result(generate(asked), len(PROMPT))
    assert greedy.token_ids == directly(tiny, do_sample=False, max_new_tokens=20, eos_token_id=66_000)
    assert greedy.finish_reason == "length"
    assert greedy.stats is not None
    assert (greedy.stats["cycles"], greedy.stats["acceptance_length"]) == (20, 1.0)
    assert greedy.first_token_seconds is not None
    assert 0 < greedy.first_token_seconds < greedy.total_seconds
    assert greedy.peak_bytes is not None
    sampling = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    drawn = generate(encode_request(PROMPT, SamplingParams(max_tokens=20, seed=6, **sampling), seed=0))
    assert drawn["token_ids"] == directly(tiny, max_new_tokens=20, do_sample=True, **sampling)


@pytest.mark.slow
def test_transformers_generates_in_its_own_process(tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_PEER_TRANSFORMERS", sys.executable)
    with Peer(find_peer("transformers"), PeerModel(folder=tiny[0], threads=1)) as peer:
        answer = peer.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
    assert answer.token_ids == directly(tiny, do_sample=False, max_new_tokens=20, eos_token_id=66_000)


def test_transformers_speculates_and_stops_at_any_eos_token(workers: None, tiny: tuple[Path, Any]) -> None:
    worker: Any = importlib.import_module("transformers_worker")
    folder, _ = tiny
    assert worker.end_ids(folder) == [2, 65]
    plain = directly(tiny, do_sample=False, max_new_tokens=40, eos_token_id=66_000)
    asked = encode_request(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True), seed=0)
    lookup = told(folder, "lookup", options={"tokens": 5, "ngram": 2})
    assisted = told(folder, "assisted", assistant=str(folder))
    for message in (lookup, assisted):
        found = worker.load(message)[0](asked)
        counts = found["counts"]
        assert found["token_ids"] == plain
        assert counts["accepted"] == 40 - counts["cycles"]
        assert sum(counts["accepted_by_depth"]) == counts["accepted"]
        assert sum(counts["tried_by_depth"]) == counts["drafted"]
        assert counts["accepted"] > 0  # the model as its own assistant, and a repetitive text
    end = plain[6]
    config = folder / "generation_config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "eos_token_id": [2, end]}))
    try:
        found = worker.load(told(folder))[0](encode_request(PROMPT, SamplingParams(max_tokens=40), seed=0))
    finally:
        config.write_text(json.dumps(content))
    assert found["token_ids"] == plain[: plain.index(end) + 1]
    assert found["finish_reason"] == "stop"


# The other real engines, if installed


def real(name: str) -> PeerSpec:
    """A peer whose Python is given by the user: this environment has at most transformers."""
    spec = find_peer(name)
    if not os.environ.get(environments.python_variable(spec.engine)):
        pytest.skip(f"{environments.python_variable(spec.engine)} names no Python with it")
    why = explain_absence(spec)
    if why is not None:
        pytest.skip(why)
    return spec


@pytest.mark.parametrize("name", ["llamacpp", "llamacpp:lookup", "llamacpp:lookup,kind=ngram-cache"])
def test_llama_generates(name: str, tmp_path: Path) -> None:
    spec = real(name)
    file = write_toy(tmp_path / "toy.gguf")
    with Peer(spec, PeerModel(folder=tmp_path, gguf=file, threads=1, max_context=64)) as peer:
        first, second = (peer.generate([5, 6, 7, 5, 6], SamplingParams(max_tokens=16)) for _ in range(2))
        with pytest.raises(DraftwoodError, match="context"):
            peer.generate([5] * 500, SamplingParams(max_tokens=2))
    assert first.token_ids == second.token_ids
    assert 1 <= len(first.token_ids) <= 16
    assert first.stats is not None
    assert first.stats["cycles"] + first.stats["accepted_nodes"] == len(first.token_ids)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", ["vllm", "vllm:ngram", "vllm:suffix", "vllm:draftwood"])
def test_vllm_generates(name: str, smollm2: Any) -> None:
    spec = real(name)
    with Peer(spec, PeerModel(folder=smollm2.path, threads=2, max_context=128)) as peer:
        answer = peer.generate([504, 3575, 282, 4649, 314], SamplingParams(max_tokens=12, ignore_eos=True))
    assert len(answer.token_ids) == 12
    assert answer.token_ids[0] == 7042  # Paris
    assert answer.stats is not None
    assert answer.stats["cycles"] + answer.stats["accepted_nodes"] == 12
    assert answer.first_token_seconds is not None


def test_workers_run_without_draftwood() -> None:
    """Each worker starts in a bare Python: loading fails with a message instead of a crash."""
    for engine in ENGINES:
        message = json.dumps({"id": 1, "op": "generate"}) + "\n"
        command = [sys.executable, "-S", str(WORKERS / f"{engine}_worker.py")]
        done = subprocess.run(command, input=message, capture_output=True, text=True, check=True, timeout=60)
        assert json.loads(done.stdout) == {"id": 1, "error": "AssertionError: no model is loaded"}
