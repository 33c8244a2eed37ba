"""Which models the transformers target supports: models without trees, invalid configurations, damaged folders."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers", reason="the transformers target needs the extra 'hf'")

from draftwood.errors import CapabilityError, ModelError  # noqa: E402
from draftwood.targets.base import Segment, chain_parents  # noqa: E402
from draftwood.targets.hf import HFTarget  # noqa: E402
from draftwood.targets.hf import target as hf  # noqa: E402
from draftwood.targets.hf.masks import FULL, mask_styles  # noqa: E402
from draftwood.targets.hf.plain import PlainTarget  # noqa: E402
from tests.tools.hf import CONFIGS, CONTEXT, GROUPED, VOCAB, build, close_to, plain, prefill, target_of, text_of  # noqa: E402

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


def test_configurations_that_a_short_probe_cannot_judge_are_refused() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    with pytest.raises(CapabilityError, match="dynamic"):
        HFTarget(build(transformers.LlamaConfig(**GROUPED, rope_parameters=dynamic)))
    config = CONFIGS["llama"]()
    config.attn_temperature_tuning = True  # as in Llama 4
    with pytest.raises(CapabilityError, match="attn_temperature_tuning"):
        HFTarget(build(config))


def test_the_probe_alone_finds_a_recurrent_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "find_obstacles", lambda *_: [])
    with pytest.raises(CapabilityError, match="MambaForCausalLM"):
        HFTarget(mamba())


def test_the_probe_detects_a_missing_window(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mask_styles(CONFIGS["gemma3-window"]()) != [FULL]
    monkeypatch.setattr(hf, "mask_styles", lambda _: [FULL])
    for name in ("gemma3-window", "mistral-window"):
        # A window as wide as the context: only the probe's smaller one can detect it.
        config = CONFIGS[name]()
        config.sliding_window = CONTEXT
        with pytest.raises(CapabilityError, match="differ"):
            HFTarget(build(config))


def test_plain_decoding_is_opt_in_and_takes_chains_only() -> None:
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
    target.forward([Segment(sequence, [3], [-1], 1)])
    with pytest.raises(CapabilityError, match=f"{target.info.architecture} runs without draft trees"):
        target.forward([Segment(sequence, [4], [0], 1, 1)])
    # Partly kept, truncated and copied: the target feeds the tokens again and stays exact.
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


# -- loading from folders --------------------------------------------------------------------------------------------


def test_from_folder(tmp_path: Path) -> None:
    model = build(CONFIGS["qwen2"]())
    model.save_pretrained(tmp_path / "small")
    target = HFTarget.from_folder(tmp_path / "small", dtype=torch.float32, device=torch.device("cpu"))
    assert (target.info.name, target.info.architecture) == ("small", "Qwen2ForCausalLM")
    text = text_of(random.Random(10), 9)
    _, logits = prefill(target, text)
    close_to(logits, plain(target_of("qwen2"), text))
    with pytest.raises(ModelError, match="no config"):
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
def test_invalid_configurations_raise_model_errors(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
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
def test_damaged_weights_raise_model_errors(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    build(CONFIGS["llama"]()).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match="SafetensorError"):
        HFTarget.from_folder(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


def test_ctrl_c_while_loading_is_not_a_model_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        HFTarget.from_folder(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


OWN_CODE = """
import pathlib, transformers
pathlib.Path(__file__).with_name("ran").touch()
pathlib.Path({mark!r}).touch()
class OwnConfig(transformers.LlamaConfig):
    model_type = "own"
class OwnForCausalLM(transformers.LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.parametrize("model_type", ["own", "llama"])
def test_code_in_a_model_folder_never_runs(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if standard input says yes. A folder with code that is not needed loads without it."""
    folder, mark = tmp_path / "model", tmp_path / "ran"
    build(CONFIGS["llama"]()).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type, "auto_map": own}))
    (folder / "own.py").write_text(OWN_CODE.format(mark=str(mark)))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    if model_type == "llama":
        assert HFTarget.from_folder(folder, **options).info.architecture == "LlamaForCausalLM"
    else:
        with pytest.raises(ModelError, match="code from its own folder") as caught:
            HFTarget.from_folder(folder, **options)
        assert "own.OwnConfig" in str(caught.value)
    assert not mark.exists()


def test_attention_code_from_the_hub_is_refused(tmp_path: Path) -> None:
    build(CONFIGS["llama"]()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_implementation": "somebody/kernel"}))
    with pytest.raises(ModelError, match="somebody/kernel"):
        HFTarget.from_folder(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


def test_the_refusal_of_alibi_models_says_so() -> None:
    with pytest.raises(CapabilityError, match="ALiBi"):
        HFTarget.from_model(bloom())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_folder_that_lacks_weights_is_refused(family: str, tmp_path: Path) -> None:
    """transformers would use random numbers; a head tied to the embedding is not missing."""
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
