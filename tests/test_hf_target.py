"""The transformers target against the bare models: tiny, random, built from configurations."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers", reason="the transformers target needs the extra 'hf'")

from draftwood.errors import CapabilityError, ModelError, OptionError  # noqa: E402
from draftwood.target.base import Segment, chain_parents  # noqa: E402
from draftwood.target.hf import HFTarget  # noqa: E402
from draftwood.target.hf import target as hf  # noqa: E402
from draftwood.target.hf.masks import FULL, mask_styles  # noqa: E402
from draftwood.target.hf.plain import PlainTarget  # noqa: E402

VOCAB, CONTEXT, WINDOW, LAYERS = 67, 96, 7, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Large random weights: attention has to matter, or a wrong mask would hide in the noise.
    "initializer_range": 0.3,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=LAYERS,
        n_head=4,
        n_positions=CONTEXT,
        initializer_range=0.3,
        eos_token_id=2,
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES),
    "phi": lambda: transformers.PhiConfig(**SIZES),
    "phi3-window": lambda: transformers.Phi3Config(**GROUPED, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=WINDOW, layer_types=MIXED_LAYERS, attn_logit_softcapping=2.0
    ),
    "gemma3-window": lambda: transformers.Gemma3TextConfig(
        **GROUPED, head_dim=8, sliding_window=WINDOW, layer_types=MIXED_LAYERS
    ),
    "mistral-window": lambda: transformers.MistralConfig(**GROUPED, sliding_window=WINDOW),
}
every_model = pytest.mark.parametrize("name", CONFIGS)


def build(config: Any) -> Any:
    torch.manual_seed(5)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


@cache
def target_of(name: str) -> HFTarget:
    target = HFTarget(build(CONFIGS[name]()), max_batch=16)
    target.set_taps(())
    return target


def plain(target: HFTarget, text: Sequence[int]) -> torch.Tensor:
    """Logits ``[n, V]`` of a text through the bare model: no cache, no mask, no positions of ours."""
    with torch.no_grad():
        logits: torch.Tensor = target._model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0]
    return logits


def text_of(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(size)]


def tree_of(rng: random.Random, size: int) -> tuple[list[int], list[int]]:
    return text_of(rng, size), [-1, *(rng.randrange(max(0, i - 4), i) for i in range(1, size))]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def prefill(target: Any, text: Sequence[int], chunk: int = 1000, capacity: int = CONTEXT) -> tuple[int, torch.Tensor]:
    sequence = target.open(capacity)
    rows = []
    for start in range(0, len(text), chunk):
        part = text[start : start + chunk]
        rows.append(target.forward([Segment(sequence, part, chain_parents(len(part)), len(part))]).logits)
        target.keep(sequence, range(len(part)))
    return sequence, torch.cat(rows)


def close_to(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@every_model
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), prefix_len=st.integers(0, 24), size=st.integers(1, 14))
def test_every_node_of_a_tree_gets_the_logits_of_its_path(name: str, seed: int, prefix_len: int, size: int) -> None:
    target, rng = target_of(name), random.Random(seed)
    prefix = text_of(rng, prefix_len)
    tokens, parents = tree_of(rng, size)
    sequence = prefill(target, prefix)[0] if prefix else target.open(CONTEXT)
    output = target.forward([Segment(sequence, tokens, parents, size)])
    target.close(sequence)
    for node in range(size):
        path = [tokens[i] for i in path_to(parents, node)]
        close_to(output.logits[node], plain(target, [*prefix, *path])[-1])
    assert output.logits.dtype == torch.float32
    assert output.greedy_ids.tolist() == output.logits.argmax(-1).tolist()


@every_model
def test_packed_sequences_do_not_see_each_other(name: str) -> None:
    target, rng = target_of(name), random.Random(1)
    # Different capacities and an early close scatter the extents over the pool, out of order.
    hole = target.open(40)
    opened = [prefill(target, text_of(rng, 5 + 9 * i), capacity=40 + i)[0] for i in range(2)]
    target.close(hole)
    opened.append(prefill(target, text_of(rng, 11), capacity=40)[0])
    segments = []
    for i, sequence in enumerate(opened):
        tokens, parents = tree_of(rng, 4 + 3 * i)
        segments.append(Segment(sequence, tokens, parents, (2 + i, len(tokens), 0)[i]))
    alone = [target.forward([segment]) for segment in segments]
    together = target.forward(segments).split(segments)
    for one, packed in zip(alone, together, strict=True):
        close_to(packed.logits, one.logits)
    assert [len(part.logits) for part in together] == [2, 7, 0]
    for sequence in opened:
        target.close(sequence)


@every_model
def test_what_is_kept_equals_a_fresh_prefill(name: str) -> None:
    target, rng = target_of(name), random.Random(2)
    text = text_of(rng, 6)
    sequence, _ = prefill(target, text)
    for _ in range(5):
        tokens, parents = tree_of(rng, 12)
        target.forward([Segment(sequence, tokens, parents, 12)])
        path = path_to(parents, rng.randrange(12))
        target.keep(sequence, path)
        text.extend(tokens[node] for node in path)
        assert target.length(sequence) == len(text)
    later = text_of(rng, 3)
    output = target.forward([Segment(sequence, later, chain_parents(3), 3)])
    close_to(output.logits, plain(target, [*text, *later])[-3:])
    target.close(sequence)


@every_model
def test_chunked_prefill_equals_one_go(name: str) -> None:
    target, rng = target_of(name), random.Random(3)
    text = text_of(rng, 29)
    for chunk in (1, 5, 29):
        sequence, logits = prefill(target, text, chunk)
        close_to(logits, plain(target, text))
        target.close(sequence)


@every_model
def test_truncate_and_fork(name: str) -> None:
    target, rng = target_of(name), random.Random(4)
    text, other, third = text_of(rng, 20), text_of(rng, 4), text_of(rng, 4)
    sequence, _ = prefill(target, text)
    copy = target.fork(sequence, 60)
    target.truncate(sequence, 13)
    assert (target.length(sequence), target.length(copy)) == (13, 20)
    segments = [Segment(sequence, other, chain_parents(4), 4), Segment(copy, third, chain_parents(4), 4)]
    cut, forked = target.forward(segments).split(segments)
    close_to(cut.logits, plain(target, [*text[:13], *other])[-4:])
    close_to(forked.logits, plain(target, [*text, *third])[-4:])
    target.close(sequence)
    target.close(copy)


@every_model
def test_taps_are_the_inputs_of_layers_and_the_last_output_before_the_norm(name: str) -> None:
    target, rng = target_of(name), random.Random(6)
    text = text_of(rng, 12)
    with torch.no_grad():
        states = target._model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
    decoder = target._model.get_decoder()
    norm = next(
        getattr(decoder, field)
        for field in ("norm", "ln_f", "final_layer_norm", "final_layernorm")
        if hasattr(decoder, field)
    )
    sequence = target.open(CONTEXT)
    target.set_taps([2, 0, LAYERS])
    try:
        taps = target.forward([Segment(sequence, text, chain_parents(12), 0)]).taps
    finally:
        target.set_taps([])
        target.close(sequence)
    assert taps is not None
    third, first, last = taps.split(32, dim=-1)
    close_to(third, states[2][0])
    close_to(first, states[0][0])
    with torch.no_grad():
        close_to(norm(last), states[-1][0])


def test_taps_that_do_not_exist_are_refused() -> None:
    with pytest.raises(OptionError, match="0 to 3"):
        target_of("llama").set_taps([4])


@pytest.mark.parametrize("name", ["llama", "gemma3-window"])
def test_bfloat16(name: str) -> None:
    target, rng = HFTarget(build(CONFIGS[name]()).to(torch.bfloat16)), random.Random(7)
    exact = target_of(name)
    text = text_of(rng, 20)
    sequence, logits = prefill(target, text, chunk=6)
    assert target.info.dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    error = (logits - plain(exact, text)).norm() / plain(exact, text).norm()
    assert error < 0.1
    target.close(sequence)


@every_model
def test_info(name: str) -> None:
    target = target_of(name)
    info = target.info
    assert (info.vocab_size, info.hidden_size, info.num_layers) == (VOCAB, 32, LAYERS)
    assert (info.context_length, info.eos_token_ids) == (CONTEXT, (2,))
    assert info.backend == "transformers"
    assert info.can_tap
    heads = 4 if name in ("gpt2", "gpt_neox", "phi") else 2
    assert info.cache_bytes_per_token == LAYERS * heads * 8 * 2 * 4
    assert info.num_parameters == sum(p.numel() for p in target._model.parameters())
    assert target.num_slots == 16 * (CONTEXT + 64)  # each with room for a tree


def test_a_full_cache_says_so() -> None:
    target = HFTarget(build(CONFIGS["llama"]()), cache_tokens=40)
    first = target.open(30)
    assert not target.can_open(11)
    with pytest.raises(CapabilityError, match="no room"):
        target.open(11)
    with pytest.raises(CapabilityError, match="outgrows"):
        target.forward([Segment(first, [3] * 31, chain_parents(31), 0)])
    target.close(first)
    assert target.can_open(40)


def test_positions_beyond_the_context_are_refused() -> None:
    target = target_of("gpt2")
    sequence = target.open(CONTEXT + 8)
    with pytest.raises(CapabilityError, match="beyond the context"):
        target.forward([Segment(sequence, [3] * (CONTEXT + 1), chain_parents(CONTEXT + 1), 0)])
    target.close(sequence)


def test_the_cache_grows_with_use() -> None:
    target = HFTarget(build(transformers.LlamaConfig(**GROUPED | {"max_position_embeddings": 2000})), max_batch=2)
    assert target._cache.rows[0][0].shape[2] == 256
    text = text_of(random.Random(8), 300)
    sequence, logits = prefill(target, text, chunk=100, capacity=2000)
    assert target._cache.rows[0][0].shape[2] == 512
    close_to(logits, plain(target, text))
    target.close(sequence)


# -- models that cannot run trees ------------------------------------------------------------------------------------


def mamba() -> Any:
    return build(
        transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4, eos_token_id=2)
    )


def gpt_neo() -> Any:
    kinds = [[["global", "local"], 1]]
    return build(
        transformers.GPTNeoConfig(vocab_size=VOCAB, hidden_size=32, num_layers=2, attention_types=kinds, num_heads=4)
    )


def t5() -> Any:
    torch.manual_seed(5)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    )


def bloom() -> Any:
    return build(transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4))


@pytest.mark.parametrize("make", [mamba, gpt_neo, t5, bloom])
def test_models_without_trees_are_refused_by_name(make: Callable[[], Any]) -> None:
    model = make()
    with pytest.raises(CapabilityError, match=type(model).__name__) as caught:
        HFTarget.from_model(model)
    assert "hf-plain" in str(caught.value)


def test_what_a_short_probe_cannot_see_is_refused_by_configuration() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    with pytest.raises(CapabilityError, match="dynamic"):
        HFTarget(build(transformers.LlamaConfig(**GROUPED, rope_parameters=dynamic)))
    config = CONFIGS["llama"]()
    config.attn_temperature_tuning = True  # as Llama 4 has it
    with pytest.raises(CapabilityError, match="attn_temperature_tuning"):
        HFTarget(build(config))


def test_the_probe_alone_finds_a_recurrent_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "obstacles", lambda *_: [])
    with pytest.raises(CapabilityError, match="MambaForCausalLM"):
        HFTarget(mamba())


def test_the_probe_sees_a_window_that_the_masks_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mask_styles(CONFIGS["gemma3-window"]()) != [FULL]
    monkeypatch.setattr(hf, "mask_styles", lambda _: [FULL])
    for name in ("gemma3-window", "mistral-window"):
        # A window as wide as the context: only the probe's shrunken one can tell.
        config = CONFIGS[name]()
        config.sliding_window = CONTEXT
        with pytest.raises(CapabilityError, match="differ"):
            HFTarget(build(config))


def test_plain_use_has_to_be_asked_for_and_takes_chains_only() -> None:
    model = mamba()
    target = HFTarget.from_model(model, allow_plain=True, cache_tokens=100)
    assert isinstance(target, PlainTarget)
    assert target.info.backend == "transformers-plain"
    rng = random.Random(9)
    text = text_of(rng, 9)
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([text])).logits[0]
    sequence, logits = prefill(target, text[:8], chunk=3, capacity=50)
    close_to(logits, whole[:8])
    with pytest.raises(CapabilityError, match="chains"):
        target.forward([Segment(sequence, [3, 4, 5], [-1, 0, 0], 3)])
    # Kept in part, cut and copied: the target feeds the tokens again and stays exact.
    target.forward([Segment(sequence, [text[8], 3, 4], [-1, 0, 1], 3)])
    target.keep(sequence, [0])
    target.truncate(sequence, 6)
    copy = target.fork(sequence, 50)
    segments = [Segment(s, text[6:], chain_parents(3), 2) for s in (sequence, copy)]
    for part in target.forward(segments).split(segments):
        close_to(part.logits, whole[7:])
    assert not target.can_open(1)
    target.close(copy)
    assert target.length(sequence) == 6


def test_from_folder(tmp_path: Path) -> None:
    model = build(CONFIGS["qwen2"]())
    model.save_pretrained(tmp_path / "small")
    target = HFTarget.from_folder(tmp_path / "small", dtype=torch.float32, device=torch.device("cpu"))
    assert (target.info.name, target.info.architecture) == ("small", "Qwen2ForCausalLM")
    text = text_of(random.Random(10), 9)
    _, logits = prefill(target, text)
    close_to(logits, plain(target_of("qwen2"), text))
    with pytest.raises(ModelError, match="cannot load"):
        HFTarget.from_folder(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"intermediate_size": 17}, "RuntimeError|mismatch"),
        ({"num_attention_heads": 0}, "Error"),
        ({"hidden_size": None}, "Error"),
        ({"hidden_size": "x"}, "Error"),
        ({"eos_token_id": "a"}, "Error"),
        ({"rope_parameters": "x"}, "Error"),
    ],
)
def test_odd_configurations_are_errors_of_the_model(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    build(CONFIGS["llama"]()).save_pretrained(tmp_path)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps(config | {key: change[key] for key in change if key in config}))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=reason) as refusal:
        HFTarget.from_folder(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    assert len(str(refusal.value).splitlines()) <= 4


@pytest.mark.parametrize("damage", [lambda whole: whole[:-500], lambda whole: b"no weights at all"])
def test_damaged_weights_are_errors_of_the_model(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    build(CONFIGS["llama"]()).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match="SafetensorError"):
        HFTarget.from_folder(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


def test_ctrl_c_while_loading_is_no_error_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        HFTarget.from_folder(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_folder_that_lacks_weights_is_refused(family: str, tmp_path: Path) -> None:
    """transformers would fill in random numbers; a head that is tied to the embedding is not missing."""
    shape = {"vocab_size": 50, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    config = transformers.AutoConfig.for_model(family, **shape, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    assert HFTarget.from_folder(tmp_path, **options).info.vocab_size == 50
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    gone = next(name for name in tensors if "mlp" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, path, {"format": "pt"})
    with pytest.raises(ModelError, match="lacks weights"):
        HFTarget.from_folder(tmp_path, **options)
