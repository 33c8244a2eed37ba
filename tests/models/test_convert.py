"""Conversion of GGUF files: all tensors, a configuration that other readers accept, and errors that name the cause."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftwood.errors import ModelError
from draftwood.models.config import parse_config
from draftwood.models.find import ModelFolder, expand, read_json_config
from draftwood.models.gguf.conversion import convert, converted_size
from draftwood.models.gguf.reader import GgufFile
from draftwood.models.gguf.safetensors_file import SafetensorsWriter
from draftwood.targets.native.weights import load_weights
from draftwood.text.tokenizer import Tokenizer
from tests.tools.gguf_writer import BF16, F16, Raw, ToyModel, f32, toy_model, write_gguf


def converted(model: ToyModel, folder: Path) -> dict[str, Any]:
    path = write_gguf(folder / "toy.gguf", model.metadata, model.tensors)
    with GgufFile(path) as file:
        convert(file, folder)
    return read_json_config(folder)[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_every_tensor_is_converted(tmp_path: Path, architecture: str, tied: bool) -> None:
    model = toy_model(architecture, tied=tied)
    config = parse_config(converted(model, tmp_path), read_json_config(tmp_path)[1])
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == model.expected.keys()
    for name, values in model.expected.items():
        assert np.array_equal(found[name].float().numpy(), values), name
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert (config.tied_embeddings, config.norm_eps, config.eos_token_ids) == (tied, 1e-5, (2,))
    load_weights(tmp_path, config, torch.float32, torch.device("cpu"))  # names and shapes as the decoder expects them


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    model = toy_model()
    path = write_gguf(tmp_path / "toy.gguf", model.metadata, model.tensors)
    heard: list[tuple[int, int]] = []
    with GgufFile(path) as file:
        convert(file, tmp_path, lambda done, total: heard.append((done, total)))
        needed = converted_size(file)
    assert [done for done, _ in heard] == sorted({done for done, _ in heard})
    assert heard[-1][0] == heard[-1][1]
    written = sum(p.stat().st_size for p in tmp_path.iterdir() if p.suffix != ".gguf")
    assert written <= needed


def test_16_bit_tensors_are_stored_losslessly(tmp_path: Path) -> None:
    model = toy_model()
    shape = model.tensors["blk.0.ffn_up.weight"].shape
    rng = np.random.default_rng(0)
    as_half = rng.standard_normal(shape).astype("<f2")
    upper = (rng.standard_normal(shape).astype("<f4").view(np.uint32) >> 16).astype("<u2")
    huge = np.tile(np.hstack([np.array([60000], "<f2").view(np.uint8), np.full(32, 100, np.uint8)]), shape[0])
    model.tensors["blk.0.ffn_up.weight"] = Raw(shape, F16, as_half.tobytes())
    model.tensors["blk.0.ffn_gate.weight"] = Raw(shape, BF16, upper.tobytes())
    model.tensors["blk.1.ffn_up.weight"] = Raw(shape, 8, huge.tobytes())  # 6,000,000: too large for float16
    converted(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    up, gate, large = (found[f"model.layers.{name}_proj.weight"] for name in ("0.mlp.up", "0.mlp.gate", "1.mlp.up"))
    assert up.dtype is torch.float16
    assert np.array_equal(up.numpy(), as_half)
    assert gate.dtype is torch.bfloat16
    assert np.array_equal(gate.view(torch.int16).numpy().view(np.uint16), upper)
    assert large.dtype is torch.bfloat16
    assert large.float().unique().tolist() == torch.tensor([5.998e6]).to(torch.bfloat16).float().tolist()
    assert found["model.norm.weight"].dtype is torch.float32


def test_bfloat16_rounds_as_torch_does(tmp_path: Path) -> None:
    from draftwood.models.gguf.conversion import _encode

    values = np.random.default_rng(1).standard_normal(4096).astype(np.float32)
    ours = torch.frombuffer(bytearray(_encode(values, "BF16")), dtype=torch.bfloat16)
    assert torch.equal(ours, torch.from_numpy(values).to(torch.bfloat16))


def test_writer_refuses_wrong_width(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "x.safetensors", {"w": ("F16", (2,))})
    with pytest.raises(ValueError, match="planned as F16"):
        writer.begin("w", "F32")
    writer.close()


def changed(key: str, value: Any) -> ToyModel:
    model = toy_model()
    model.metadata[key] = value
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (changed("general.architecture", "gemma3"), "gemma3"),
        (changed("llama.expert_count", 8), "Mixture-of-experts"),
        (changed("split.count", 2), "one part of several"),
        (changed("llama.rope.scaling.type", "yarn"), "yarn"),
        (changed("llama.rope.dimension_count", 4), "4 of 8"),
        (changed("llama.attention.head_count_kv", [2, 2]), "head_count_kv must be a whole number"),
        (changed("llama.block_count", 4_000_000_000), "more layers than it has tensors"),
        (changed("llama.block_count", 3), "lacks tensors"),
        (changed("llama.feed_forward_length", 96), "does not fit the metadata"),
        (changed("tokenizer.ggml.model", "llama"), "tokenizer model 'llama'"),
        (changed("tokenizer.ggml.pre", "tekken"), "tekken"),
        (changed("tokenizer.ggml.token_type", [1, 1]), "token types"),
        (changed("tokenizer.ggml.merges", ["no such"]), "lacks the tokens of a merge"),
        (changed("tokenizer.ggml.tokens", 5), "no vocabulary"),
    ],
)
def test_unsupported_models_are_named(tmp_path: Path, model: ToyModel, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        converted(model, tmp_path)


def test_unknown_tensors_and_invalid_values_are_named(tmp_path: Path) -> None:
    model = toy_model()
    model.tensors["blk.0.surprise.weight"] = f32(np.zeros(4))
    with pytest.raises(ModelError, match=r"blk\.0\.surprise"):
        converted(model, tmp_path)
    model = toy_model()
    model.tensors["output_norm.weight"] = f32(np.full(32, np.nan))
    with pytest.raises(ModelError, match=r"output_norm.*not finite"):
        converted(model, tmp_path)


def test_llama_3_rope_scaling_is_recovered(tmp_path: Path) -> None:
    model = toy_model()
    model.metadata["llama.rope.freq_base"] = 500000.0
    wavelengths = [2 * math.pi * 500000.0 ** (i / 8) for i in range(0, 8, 2)]
    assert wavelengths[2] < 8192 / 1 < wavelengths[3]
    smooth = np.clip((8192 / np.array(wavelengths) - 1) / 3, 0, 1)
    model.tensors["rope_freqs.weight"] = f32(1 / ((1 - smooth) / 8 + smooth))
    rope = parse_config(converted(model, tmp_path)).rope
    assert (rope.kind, rope.factor, rope.theta) == ("llama3", 8.0, 500000.0)
    model.tensors["rope_freqs.weight"] = f32(np.array([1, 2, 4, 8]))
    with pytest.raises(ModelError, match="not those of Llama 3"):
        converted(model, tmp_path)


def test_linear_rope(tmp_path: Path) -> None:
    model = toy_model()
    model.metadata.update({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    rope = parse_config(converted(model, tmp_path)).rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_folder(tmp_path: Path, architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = toy_model(architecture, pre="qwen2" if architecture != "llama" else "smollm")
    converted(model, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, values in loaded.state_dict().items():
        if name != "lm_head.weight":
            assert np.array_equal(values.numpy(), model.expected[name]), name
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path)
    messages = [{"role": "user", "content": "hello 123"}]
    encoded = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat(messages) == encoded
    assert ours.encode("hello  hello 123\n") == theirs("hello  hello 123\n")["input_ids"]


@pytest.mark.model
def test_the_default_model(smollm2: ModelFolder) -> None:
    config = parse_config(*read_json_config(smollm2.path))
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    expand(smollm2.path)
    weights = load_weights(smollm2.path, config, torch.float32, torch.device("cpu"))
    assert weights.num_parameters() == 134_515_008
    assert json.loads((smollm2.path / "draftwood.json").read_text())["source"] == smollm2.origin
