"""The native target against transformers, and against itself: trees, packing, cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.errors import CapabilityError, ModelError, OptionError
from draftwood.models.config import ARCHITECTURES, LayerKind, Rope, is_native, parse_config, read_positive
from draftwood.models.find import read_json_config
from draftwood.targets.base import ForwardOutput, Segment
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from tests.conftest import logits_after, path_to, prefill, random_parents

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-linear-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("MistralConfig", {"sliding_window": 9}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 20}),
    "qwen3-some-windows": (
        "Qwen3Config",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
}
OTHERS = {
    "GraniteForCausalLM": (
        "GraniteConfig",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 4.0},
    ),
    "SmolLM3ForCausalLM": (
        "SmolLM3Config",
        {
            "no_rope_layers": [1, 0, 1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "pad_token_id": 0,
        },
    ),
}
Style = Callable[[Mapping[str, Any]], dict[str, Any]]
BACKENDS = ("eager", "auto")


def build(name: str, folder: Path) -> torch.nn.Module:
    """A tiny random transformers model, saved as users do."""
    config_name, extra = {**MODELS, **OTHERS}[name]
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_name)(**SHAPE, **extra)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)  # biases and norms are trivial by default
    model.save_pretrained(folder)
    return model


def load(folder: Path, backend: str = "auto", dtype: torch.dtype = torch.float32) -> NativeTarget:
    config = parse_config(*read_json_config(folder))
    device = torch.device("cpu")
    return NativeTarget.from_folder(
        folder, "test", config, dtype=dtype, device=device, cache_tokens=1024, backend=backend
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_match_transformers(name: str, backend: str, tmp_path: Path, rng: random.Random) -> None:
    model = build(name, tmp_path)
    target = load(tmp_path, backend)
    tokens = [rng.randrange(SHAPE["vocab_size"]) for _ in range(40)]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits_after(target, tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3"])
def test_tree_nodes_match_their_paths(name: str, backend: str, tmp_path: Path, rng: random.Random) -> None:
    build(name, tmp_path)
    target = load(tmp_path, backend)
    prompt = [rng.randrange(211) for _ in range(23)]
    sequence = prefill(target, prompt, chunk=7)
    parents = random_parents(rng, 17)
    tokens = [rng.randrange(211) for _ in parents]
    logits = target.forward([Segment(sequence, tokens, parents, len(tokens))]).logits.clone()
    for node in range(len(tokens)):
        path = [tokens[i] for i in path_to(parents, node)]
        torch.testing.assert_close(logits[node], logits_after(target, prompt + path)[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_batch_equals_one_by_one(backend: str, rng: random.Random) -> None:
    target = tiny_target(backend=backend)
    prompts = [[rng.randrange(256) for _ in range(size)] for size in (1, 9, 30)]
    sequences = [prefill(target, prompt) for prompt in prompts]
    segments = []
    for sequence, size in zip(sequences, (1, 12, 5), strict=True):
        parents = random_parents(rng, size)
        segments.append(Segment(sequence, [rng.randrange(256) for _ in parents], parents, rng.randint(1, size)))
    together = [
        ForwardOutput(*(x.clone() for x in part[:2]), None) for part in target.forward(segments).split(segments)
    ]
    for segment, part in zip(segments, together, strict=True):
        alone = target.forward([segment])
        torch.testing.assert_close(part.logits, alone.logits, atol=1e-5, rtol=1e-5)
        assert part.logits.shape == (segment.num_logits, 258)
        assert torch.equal(part.greedy_ids, part.logits.argmax(-1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_cache_after_keep_equals_fresh_prefill(backend: str, rng: random.Random) -> None:
    target = tiny_target(backend=backend)
    tokens = [rng.randrange(256) for _ in range(11)]
    sequence = prefill(target, tokens)
    for _ in range(12):
        parents = random_parents(rng, rng.randint(1, 14))
        nodes = [rng.randrange(256) for _ in parents]
        target.forward([Segment(sequence, nodes, parents, len(nodes))])
        path = path_to(parents, rng.randrange(len(nodes)))
        target.keep(sequence, path)
        tokens += [nodes[i] for i in path]
    fresh = prefill(target, tokens)
    old, new = target.cache[sequence], target.cache[fresh]
    assert old.length == new.length == len(tokens)
    for rows in (target.cache.keys, target.cache.values):
        torch.testing.assert_close(
            rows[:, :, old.base : old.base + old.length],
            rows[:, :, new.base : new.base + new.length],
            atol=1e-5,
            rtol=1e-5,
        )


def test_truncate_and_fork(rng: random.Random) -> None:
    target = tiny_target()
    tokens = [rng.randrange(256) for _ in range(20)]
    sequence = prefill(target, tokens)
    copy = target.fork(sequence, 64)
    target.truncate(copy, 12)
    assert (target.length(sequence), target.length(copy)) == (20, 12)
    tail = [rng.randrange(256) for _ in range(4)]
    output = target.forward([Segment(copy, tail, [-1, 0, 1, 2], 1)]).logits.clone()
    torch.testing.assert_close(output[0], logits_after(target, tokens[:12] + tail)[-1], atol=1e-5, rtol=1e-5)
    again = target.forward([Segment(sequence, tail, [-1, 0, 1, 2], 1)]).logits.clone()
    torch.testing.assert_close(again[0], logits_after(target, tokens + tail)[-1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_taps_are_the_inputs_of_layers(backend: str, tmp_path: Path, rng: random.Random) -> None:
    model = build("llama", tmp_path)
    target = load(tmp_path, backend)
    target.set_taps([0, 2, 3])
    tokens = [rng.randrange(211) for _ in range(9)]
    last = []
    model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[0][0], states[2][0], last[0][0]], dim=-1)
    sequence = target.open(64)
    output = target.forward([Segment(sequence, tokens, list(range(-1, 8)), 0)])
    assert output.logits.shape == (0, 211)
    torch.testing.assert_close(output.taps, expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(OptionError, match="No such layer"):
        target.set_taps([4])


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_gives_float32_logits_near_float32_ones(backend: str, tmp_path: Path, rng: random.Random) -> None:
    build("qwen2", tmp_path)
    tokens = [rng.randrange(211) for _ in range(12)]
    exact = logits_after(load(tmp_path, backend), tokens)
    rounded = logits_after(load(tmp_path, backend, torch.bfloat16), tokens)
    assert rounded.dtype == torch.float32
    assert (rounded - exact).norm() / exact.norm() < 0.03


def test_cache_size_matches_the_configuration() -> None:
    target = tiny_target(cache_tokens=100)
    assert target.cache.nbytes == 100 * target.info.cache_bytes_per_token == 100 * TINY_CONFIG.cache_bytes_per_token(4)


def test_sequence_that_outgrows_the_cache_is_refused() -> None:
    target = tiny_target(cache_tokens=16)
    with pytest.raises(CapabilityError, match="no room"):
        target.open(17)
    sequence = target.open(16)
    assert not target.can_open(1)
    with pytest.raises(CapabilityError, match="outgrows"):
        target.forward([Segment(sequence, [1] * 17, list(range(-1, 16)), 0)])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "feed-forward"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
    ],
)
def test_unsupported_configurations_are_refused(change: dict[str, object], why: str) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **change}
    assert not is_native(config)
    with pytest.raises(CapabilityError, match=why):
        parse_config(config)


GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
}


def granite_style(config: Mapping[str, Any]) -> dict[str, Any]:
    scales = {ours: read_positive(config, theirs, 1.0) for ours, theirs in GRANITE.items()}
    return scales | {"logit_scale": 1 / read_positive(config, "logits_scaling", 1.0)}


def smollm3_style(config: Mapping[str, Any]) -> dict[str, Any]:
    ropes = [Rope(theta=10_000.0), Rope(kind="none")]
    return {"layer_kinds": tuple(LayerKind(rope=ropes[not rotates]) for rotates in config["no_rope_layers"])}


@pytest.mark.parametrize(
    ("name", "style"), [("GraniteForCausalLM", granite_style), ("SmolLM3ForCausalLM", smollm3_style)]
)
def test_a_new_architecture_is_one_row_of_the_table(
    name: str, style: Style, tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused decoders decline what they do not implement, so the eager decoder runs."""
    model = build(name, tmp_path)
    assert not is_native(read_json_config(tmp_path)[0])
    monkeypatch.setitem(ARCHITECTURES, name, style)
    target = load(tmp_path)
    assert target.info.backend == "eager"
    with pytest.raises(CapabilityError, match=r"'fused-cpu' cannot run[\s\S]*the model has"):
        load(tmp_path, "fused-cpu")
    if target.config.scales_ends:
        with pytest.raises(CapabilityError, match="embeddings"):
            target.parts()
    tokens = [rng.randrange(SHAPE["vocab_size"]) for _ in range(30)]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits_after(target, tokens), expected, atol=1e-4, rtol=1e-4)


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"missing: model\.norm\.weight"):
        load(tmp_path)
    save_file(tensors | {"model.norm.weight": norm, "model.extra": norm.clone()}, path)
    with pytest.raises(ModelError, match=r"unknown: model\.extra"):
        load(tmp_path)
    save_file(tensors | {"model.norm.weight": norm[:5].clone()}, path)
    with pytest.raises(ModelError, match=r"model\.norm\.weight does not fit"):
        load(tmp_path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load(tmp_path)
    path.unlink()
    with pytest.raises(ModelError, match="has no weights"):
        load(tmp_path)


WHOLE = {"architectures": ["LlamaForCausalLM"], **SHAPE}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "x"}, "hidden_size"),
        ({"hidden_size": 4.5}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": 5}, "num_key_value_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"max_position_embeddings": float("inf")}, "max_position_embeddings"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"sliding_window": "x"}, "sliding_window"),
        ({"eos_token_id": "a"}, "eos_token_id"),
        ({"eos_token_id": [1, None, [2]]}, "eos_token_id"),
        ({"rope_parameters": "x"}, "rope_parameters"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_theta": "x"}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"architectures": 5}, "architectures"),
        ({"layer_types": 5}, "layer_types"),
    ],
)
def test_invalid_fields_are_named(change: dict[str, object], field: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json has an invalid {field}"):
        parse_config({**WHOLE, **change})


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ModelError, match=r"config\.json lacks 'vocab_size'"):
        parse_config({key: value for key, value in WHOLE.items() if key != "vocab_size"})
    for change in ({"rope_parameters": "x"}, {"architectures": "x"}, {"layer_types": 5}):
        with pytest.raises(ModelError, match="invalid"):
            is_native({**WHOLE, **change})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "index.json is not valid JSON"),
        ("[]", "index.json does not say"),
        ("{}", "index.json does not say"),
        ('{"weight_map": {"w": 5}}', "index.json does not say"),
        ('{"weight_map": {"w": "model-00001.safetensors"}}', "model-00001.safetensors cannot be read"),
    ],
)
def test_invalid_weight_index_is_reported(tmp_path: Path, content: str, words: str) -> None:
    build("llama", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=words):
        load(tmp_path)
