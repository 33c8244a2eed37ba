"""Write small GGUF files for the tests: any metadata, any tensors, and a complete toy model."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import pre_tokenizers

F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Raw(NamedTuple):
    """A tensor as stored in the file."""

    shape: tuple[int, ...]  # outermost first
    kind: int
    data: bytes


def f32(values: np.ndarray) -> Raw:
    return Raw(values.shape, F32, values.astype("<f4").tobytes())


def q8_0(values: np.ndarray) -> tuple[Raw, np.ndarray]:
    """Integers from -127 to 127 with the scale 1/64: the tensor and its values."""
    blocks = values.astype(np.int8).reshape(-1, 32)
    scale = np.full((len(blocks), 1), 1 / 64, dtype="<f2").view(np.uint8)
    return Raw(values.shape, Q8_0, np.hstack([scale, blocks.view(np.uint8)]).tobytes()), values / np.float32(64)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Raw], *, version: int = 3, alignment: int = 32
) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors, version=version, alignment=alignment))
    return path


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, Raw], *, version: int = 3, alignment: int = 32
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    body = b""
    for name, tensor in tensors.items():
        head += _string(name) + struct.pack("<I", len(tensor.shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
        head += struct.pack("<IQ", tensor.kind, len(body))
        body += _padded(tensor.data, alignment)
    return _padded(head, alignment) + body


def _padded(data: bytes, alignment: int) -> bytes:
    return data + b"\0" * (-len(data) % alignment)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if all(isinstance(item, str) for item in value):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_string(item) for item in value)
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, their kinds, and merges: three specials, all 256 bytes, a few words, a user's token, an unused one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "Ġ Ġ"]
    words = [merge.replace(" ", "") for merge in merges]
    tokens = [*SPECIALS, *letters, *words, "<tool>", "[PAD]"]
    return tokens, [3] * len(SPECIALS) + [1] * (len(letters) + len(words)) + [4, 5], merges


def tokenizer_metadata(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    tokens, kinds, merges = vocabulary()
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


class ToyModel(NamedTuple):
    metadata: dict[str, Any]
    tensors: dict[str, Raw]
    expected: dict[str, np.ndarray]  # by Hugging Face names


def toy_model(architecture: str = "llama", *, pre: str = "smollm", tied: bool = True) -> ToyModel:
    """Two layers, four heads of eight over two for keys and values: the smallest model with every part in it."""
    hidden, inner, heads, kv_heads, layers = 32, 64, 4, 2, 2
    metadata = {
        "general.architecture": architecture,
        "general.license": "mit",
        f"{architecture}.block_count": layers,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": hidden,
        f"{architecture}.feed_forward_length": inner,
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": kv_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
    } | tokenizer_metadata(pre)
    rng = np.random.default_rng(7)
    tensors: dict[str, Raw] = {}
    expected: dict[str, np.ndarray] = {}

    def add(gguf_name: str, hf_name: str, shape: tuple[int, ...], permuted_heads: int = 0) -> None:
        whole = rng.integers(-127, 128, shape)
        if len(shape) == 1:
            values = whole.astype(np.float32) / 128
            tensors[gguf_name], expected[hf_name] = f32(_permuted(values, permuted_heads)), values
        else:
            tensors[gguf_name], _ = q8_0(_permuted(whole, permuted_heads))
            expected[hf_name] = whole / np.float32(64)

    add("token_embd.weight", "model.embed_tokens.weight", (len(vocabulary()[0]), hidden))
    add("output_norm.weight", "model.norm.weight", (hidden,))
    if not tied:
        add("output.weight", "lm_head.weight", (len(vocabulary()[0]), hidden))
    kv = hidden // heads * kv_heads
    for layer in range(layers):
        ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        turned = architecture == "llama"
        for short, long, shape, count in (
            ("attn_norm.weight", "input_layernorm.weight", (hidden,), 0),
            ("attn_q.weight", "self_attn.q_proj.weight", (hidden, hidden), heads * turned),
            ("attn_k.weight", "self_attn.k_proj.weight", (kv, hidden), kv_heads * turned),
            ("attn_v.weight", "self_attn.v_proj.weight", (kv, hidden), 0),
            ("attn_output.weight", "self_attn.o_proj.weight", (hidden, hidden), 0),
            ("ffn_norm.weight", "post_attention_layernorm.weight", (hidden,), 0),
            ("ffn_gate.weight", "mlp.gate_proj.weight", (inner, hidden), 0),
            ("ffn_up.weight", "mlp.up_proj.weight", (inner, hidden), 0),
            ("ffn_down.weight", "mlp.down_proj.weight", (hidden, inner), 0),
        ):
            add(ours + short, theirs + long, shape, count)
        if architecture == "qwen2":
            for part, size in (("q", hidden), ("k", kv), ("v", kv)):
                add(f"{ours}attn_{part}.bias", f"{theirs}self_attn.{part}_proj.bias", (size,))
        if architecture == "qwen3":
            for part in ("q", "k"):
                add(f"{ours}attn_{part}_norm.weight", f"{theirs}self_attn.{part}_norm.weight", (hidden // heads,))
    return ToyModel(metadata, tensors, expected)


def _permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Permute query and key rows as GGUF writers do: row i and row i + half of a head become neighbours."""
    if not heads:
        return rows
    size = len(rows) // heads
    order = [
        head * size + part * size // 2 + index for head in range(heads) for index in range(size // 2) for part in (0, 1)
    ]
    return rows[order]


def write_toy(path: Path, architecture: str = "llama", **options: Any) -> Path:
    model = toy_model(architecture, **options)
    return write_gguf(path, model.metadata, model.tensors)
