"""The proposer in the real vLLM, on a tiny random model: ``DRAFTWOOD_PEER_VLLM`` names a Python that has it."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections import Counter
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from draftwood.bench.peers import find_peer
from draftwood.bench.peers.environments import clean_environment, explain_absence, find_python, python_variable

ROOT = Path(__file__).parents[2]
OURS = {"method": "custom_class", "model": "draftwood.vllm.Proposer", "num_speculative_tokens": 6}
VOCAB, SAMPLES = 24, 6000
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python() -> Path:
    spec = find_peer("vllm")
    if not os.environ.get(python_variable(spec.engine)):
        pytest.skip(f"{python_variable(spec.engine)} names no Python with vLLM")
    if (why := explain_absence(spec)) is not None:
        pytest.skip(why)
    found = find_python(spec)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers", reason="it writes the model")
    from tests.tools.hf import SIZES, build

    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 128}
    folder = tmp_path_factory.mktemp("model")
    # The scale of the head: some tokens must be likely, or no guess would be accepted.
    built = build(transformers.LlamaConfig(**SIZES | sizes | {"eos_token_id": None, "num_hidden_layers": 2}))
    built.lm_head.weight.data *= 1.5
    built.save_pretrained(folder)
    return folder


def run(
    python: Path, model: Path, speculation: Any, batch: int, requests: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The answers of one engine."""
    given = {
        "model": str(model), "dtype": "float32", "max_context": 128, "batch": batch, "tokenizer": False,
        "speculation": speculation, "repair": True,
    }  # fmt: skip
    environment = {**clean_environment(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "DRAFTWOOD_VLLM_MIN_CHANCE": "0.05"}
    done = subprocess.run(
        [str(python), str(ROOT / "benchmarks/vllm_drafting_worker.py"), json.dumps(given)],
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True, text=True, env=environment, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line)["answer"] for line in done.stdout.splitlines() if line.startswith('{"answer"')]


def test_greedy_outputs_equal_those_without_speculation(python: Path, model: Path) -> None:
    """More requests than rows, of different lengths: rows come, go and move."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(2, 40))] for _ in range(150)]
    requests = [{"prompts": prompts, "max_tokens": count, "temperature": 0.0} for count in (30, 7)]
    plain, ours = (run(python, model, speculation, 32, requests) for speculation in (None, OURS))
    assert [answer["texts"] for answer in ours] == [answer["texts"] for answer in plain]
    assert ours[0]["accepted_tokens"] > 100


def test_sampled_outputs_have_the_distribution_without_speculation(python: Path, model: Path) -> None:
    """Guesses come from earlier answers to the same prompt."""
    requests = [
        {"prompts": [[5, 6, 7, 5, 6]] * SAMPLES, "max_tokens": 6, "temperature": temperature}
        for temperature in (1.0, 0.9)
    ]
    plain, cooler = run(python, model, None, 256, requests)
    [ours] = run(python, model, OURS, 256, requests[:1])
    assert 0.1 * SAMPLES < ours["accepted_tokens"] < 0.8 * ours["draft_tokens"]
    places = [(start, start + 1) for start in range(6)] + [(start, start + 2) for start in range(5)] + [(0, 4)]
    for start, end in places:
        assert deviation(plain, ours, start, end) < 5.0
    assert deviation(plain, cooler, 3, 5) > 7.0  # a small change would be seen


def deviation(one: dict[str, Any], other: dict[str, Any], start: int, end: int) -> float:
    """How far the tokens from ``start`` to ``end`` are from one distribution: chi-square, in standard deviations."""
    counts = [Counter(tuple(text[start:end]) for text in answer["texts"]) for answer in (one, other)]
    assert sum(counts[0].values()) == sum(counts[1].values())
    cells: dict[Any, list[int]] = {}
    for outcome in counts[0] | counts[1]:
        pair = [count[outcome] for count in counts]
        cell = cells.setdefault(outcome if sum(pair) >= 10 else "rare", [0, 0])
        cell[:] = [cell[0] + pair[0], cell[1] + pair[1]]
    free = len(cells) - 1
    assert free > 0
    total = sum((first - second) ** 2 / (first + second) for first, second in cells.values())
    return (total - free) / sqrt(2 * free)
