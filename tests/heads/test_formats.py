"""Checkpoints of heads: round trips, the names and numbers each engine expects, and every kind of damage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.errors import CapabilityError, ModelError, OptionError
from draftwood.heads import KINDS, load_head, save_head
from draftwood.models.config import Rope
from tests.tools.head import SMALL, Tensors, gives_same_logits, random_head, rewrite, saved, written

LAYER = [
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
]
FIRST_LAYER = [*LAYER, "input_layernorm.weight", "hidden_norm.weight"]
OUTSIDE = ["fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"]  # of an EAGLE-3 head
MIDLAYER = {*OUTSIDE, *(f"midlayer.{name}" for name in FIRST_LAYER)}
VOCABULARY = {"draft_vocab_size": 17}
NORMS = {"norm_before_fc": True, "fc_norm": True, "norm_output": True}


# -- round trips -----------------------------------------------------------------------------------------------------

EAGLE3_EXPORTS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", VOCABULARY),
    ("eagle", {}),
    ("eagle", {"hidden_size": 16, "own_embed": True}),
    ("eagle", {"own_embed": True}),
    ("sglang", VOCABULARY),
    ("sglang", {**VOCABULARY, **NORMS, "fc_bias": True}),
    ("sglang", {"own_lm_head": False}),
    ("sglang", {**VOCABULARY, "num_layers": 3, "num_taps": 2, "taps": (3, 9)}),
    ("vllm", VOCABULARY),
    ("vllm", {**VOCABULARY, **NORMS, "norm_before_residual": True}),
    ("vllm", {"own_lm_head": False, "num_layers": 2, "qkv_bias": True, "o_bias": True}),
    ("vllm", {"own_embed": True, "num_taps": 4, "taps": (0, 2, 4, 9)}),
    ("vllm", {"rope": Rope(kind="llama3", theta=5e5, factor=8.0, low_freq_factor=2.0, original_context=64)}),
    ("speculators", VOCABULARY),
    ("speculators", {**NORMS, "norm_before_residual": True, "num_layers": 2}),
    ("speculators", {"qk_norm": True, "own_embed": True, "rope": Rope(kind="linear", factor=2.0)}),
]
OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("eagle", "eagle", {}),
    ("eagle", "eagle", {"fc_bias": False, "qkv_bias": True, "num_layers": 2}),
    ("medusa", "medusa", {}),
    ("medusa", "medusa", {"num_residual": 3, "num_heads_ahead": 2}),
    ("medusa", "medusa", {"own_lm_head": False}),
    ("hydra", "hydra", {}),
    ("hydra", "hydra", {"num_residual": 3, "num_heads_ahead": 2}),
    ("hydra", "hydra", {"num_residual": 2, "prefix": True}),
    *((kind, "draftwood", {}) for kind in KINDS),
    ("eagle", "draftwood", {"feature": "raw", "o_bias": True, "rope": Rope(kind="linear", theta=50.0, factor=2.0)}),
    ("eagle3", "draftwood", {**VOCABULARY, **NORMS, "num_layers": 2, "qkv_bias": True, "qk_norm": True}),
    ("medusa", "draftwood", {"feature": "raw", "num_residual": 2}),
    ("hydra", "draftwood", {"prefix": True, "num_residual": 3, "qk_norm": True}),
]
UNSAID = ("taps", "target_num_layers", "target_name")  # which other layouts may omit


@pytest.mark.parametrize(("kind", "to", "changes"), [*(("eagle3", *each) for each in EAGLE3_EXPORTS), *OTHERS], ids=str)
def test_round_trip(tmp_path: Path, kind: str, to: str, changes: dict[str, Any]) -> None:
    head, folder = saved(tmp_path, kind, to, **changes)
    loaded, config, name = load_head(folder)
    assert name == to
    assert loaded.config == config
    unsaid = {field: getattr(config, field) for field in UNSAID}
    assert config == (head.config if to == "draftwood" else replace(head.config, **unsaid))
    before, after = head.state_dict(), loaded.state_dict()
    assert set(before) == set(after)
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert gives_same_logits(head, loaded)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]  # no temporary files are left
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # all files have the same permissions


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_are_kept_by_default(tmp_path: Path, dtype: torch.dtype) -> None:
    head = random_head("eagle3", SMALL, dtype=dtype, **VOCABULARY)
    folder = save_head(head, tmp_path / "head", to="eagle")
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert {p.dtype for p in load_head(folder).head.parameters()} == {dtype}
    wide = load_head(folder, "cpu", torch.float32).head
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    assert wide.state_dict()["d2t"].dtype == torch.int64
    assert wide.state_dict()["t2d"].dtype == torch.bool


# -- what each engine expects ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["eagle", "sglang", "vllm"])
def test_original_tensor_names(tmp_path: Path, to: str) -> None:
    _, folder = saved(tmp_path, "eagle3", to, **VOCABULARY)
    content, tensors = written(folder)
    assert set(tensors) == MIDLAYER
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (24, 2 * 24)
    assert tensors["fc.weight"].shape == (24, 3 * 24)
    assert tensors["lm_head.weight"].shape == (17, 24)
    assert content["draft_vocab_size"] == 17
    assert content["vocab_size"] == 40
    assert content["num_hidden_layers"] == 1
    assert content["tie_word_embeddings"] is False
    assert "target_hidden_size" not in content


@pytest.mark.parametrize("to", ["eagle", "sglang", "vllm", "speculators"])
def test_vocabulary_is_stored_as_offsets_and_mask(tmp_path: Path, to: str) -> None:
    head, folder = saved(tmp_path, "eagle3", to, **VOCABULARY)
    _, tensors = written(folder)
    tokens = head.target_ids(torch.arange(17))
    assert tensors["d2t"].dtype == torch.int64
    assert torch.equal(tensors["d2t"] + torch.arange(17), tokens)
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].shape == (40,)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), tokens)


@pytest.mark.parametrize("to", ["eagle", "sglang", "vllm", "speculators"])
def test_full_vocabulary_has_no_map(tmp_path: Path, to: str) -> None:
    _, folder = saved(tmp_path, "eagle3", to)
    assert not {"d2t", "t2d"} & set(written(folder)[1])


def test_speculators(tmp_path: Path) -> None:
    head = random_head("eagle3", SMALL, **VOCABULARY, **NORMS)
    folder = save_head(head, tmp_path / "head", to="speculators", target_name="org/big", model=SMALL)
    content, tensors = written(folder)
    extra = {"input_norm.weight", *(f"fc_norm.{i}.weight" for i in range(3))}
    assert set(tensors) == {*OUTSIDE, *extra, *(f"layers.0.{name}" for name in FIRST_LAYER)}
    assert content["architectures"] == ["Eagle3Speculator"]
    assert content["speculators_model_type"] == "eagle3"
    assert {name: content[name] for name in NORMS} == NORMS
    assert content["norm_before_residual"] is False
    assert content["embed_requires_grad"] is False
    assert content["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert content["transformer_layer_config"]["model_type"] == "llama"
    assert content["transformer_layer_config"]["head_dim"] == 6
    config = content["speculators_config"]
    assert config["verifier"] == {"name_or_path": "org/big", "architectures": ["LlamaForCausalLM"]}
    (proposal,) = config["proposal_methods"]
    assert proposal["proposal_type"] == config["default_proposal_method"] == "greedy"
    assert set(proposal) == {"proposal_type", "speculative_tokens", "accept_tolerance", "verifier_accept_k"}
    assert load_head(folder).config.target_name == "org/big"


def test_taps_are_numbered_per_engine(tmp_path: Path) -> None:
    head = random_head("eagle3", SMALL, taps=(1, 5, 9), target_name="org/target")
    ids = "eagle_aux_hidden_state_layer_ids"
    contents = {}
    for to in ("sglang", "vllm", "speculators", "draftwood"):
        folder = save_head(head, tmp_path / to, to=to)
        contents[to] = written(folder)[0]
        assert load_head(folder).config.taps == (1, 5, 9)
    assert contents["sglang"]["eagle_config"] == {"use_aux_hidden_state": True, ids: [0, 4, 8]}
    assert ids not in contents["sglang"]
    assert contents["vllm"][ids] == [1, 5, 9]
    assert "eagle_config" not in contents["vllm"]
    assert contents["speculators"][ids] == [1, 5, 9]
    assert contents["draftwood"]["draftwood"]["taps"] == [1, 5, 9]


def test_both_keys_must_name_the_same_taps(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, "eagle3", "sglang")
    rewrite(folder, lambda content, _: content.update(eagle_aux_hidden_state_layer_ids=[2, 4, 6]))
    assert load_head(folder).config.taps == (2, 4, 6)
    rewrite(folder, lambda content, _: content.update(eagle_aux_hidden_state_layer_ids=[1, 3, 5]))
    with pytest.raises(ModelError, match="two different sets"):
        load_head(folder)


@pytest.mark.parametrize("to", ["eagle", "sglang", "vllm"])
def test_missing_taps_use_defaults(tmp_path: Path, to: str) -> None:
    head = random_head("eagle3", SMALL, taps=())
    config = load_head(save_head(head, tmp_path / "head", to=to)).config
    assert config.taps == ()
    assert config.taps_for(32) == (2, 16, 29)


def test_architectures(tmp_path: Path) -> None:
    head = random_head("eagle3", SMALL)
    wanted = {
        "eagle": "LlamaForCausalLM",
        "sglang": "LlamaForCausalLMEagle3",
        "vllm": "Eagle3LlamaForCausalLM",
        "draftwood": "LlamaForCausalLM",
    }
    for to, architecture in wanted.items():
        assert written(save_head(head, tmp_path / to, to=to))[0]["architectures"] == [architecture]


def test_sglang_names_norm_of_further_layers_hidden_norm(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, "eagle3", "sglang", num_layers=2)
    second = {name for name in written(folder)[1] if name.startswith("layers.1.")}
    assert second == {f"layers.1.{name}" for name in [*LAYER, "hidden_norm.weight"]}
    head = random_head("eagle3", SMALL, num_layers=2)
    second = {name for name in written(save_head(head, tmp_path / "v", to="vllm"))[1] if name.startswith("layers.1.")}
    assert second == {f"layers.1.{name}" for name in [*LAYER, "input_layernorm.weight"]}


def test_alternative_sglang_names(tmp_path: Path) -> None:
    head, folder = saved(tmp_path, "eagle3", "sglang", **VOCABULARY, fc_norm=True)

    def respell(content: dict[str, Any], tensors: Tensors) -> None:
        old = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}
        for name in list(tensors):
            spelled = name.replace("midlayer.", "layers.0.")
            for new, legacy in old.items():
                spelled = spelled.replace(new, legacy)
            tensors[name if "lm_head" in name else f"model.{spelled}"] = tensors.pop(name)
        del tensors["model.t2d"], content["fc_norm"]
        content["use_aux_norm"] = True

    assert gives_same_logits(head, load_head(rewrite(folder, respell)).head)


def test_eagle1_names(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, "eagle", "eagle")
    content, tensors = written(folder)
    assert set(tensors) == {"fc.weight", "fc.bias", *(f"layers.0.{name}" for name in LAYER)}
    assert content["bias"] is True
    assert content["architectures"] == ["LlamaForCausalLM"]


def test_medusa_names(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, "medusa", "medusa", num_residual=2, num_heads_ahead=2)
    content, tensors = written(folder)
    assert (folder / "medusa_lm_head.pt").is_file()
    blocks = [f"{i}.{j}.linear.{part}" for i in range(2) for j in range(2) for part in ("weight", "bias")]
    assert set(tensors) == {*blocks, "0.2.weight", "1.2.weight"}
    assert content["medusa_num_heads"] == content["medusa_num_layers"] == 2
    assert content["base_model_name_or_path"] == "org/target"


def test_hydra_names(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, "hydra", "hydra", num_residual=2, num_heads_ahead=2)
    content, tensors = written(folder)
    mlp = [f"hydra_mlp.{i}.{part}" for i in range(2) for part in ("0.linear", "0.res_connection", "1.linear")]
    names = [*mlp, "hydra_lm_head.0", "hydra_lm_head.1"]
    assert set(tensors) == {f"{name}.{part}" for name in names for part in ("weight", "bias")}
    assert tensors["hydra_mlp.1.0.linear.weight"].shape == (24, 3 * 24)
    assert content["grounded_heads"] is True
    assert content["hydra_head_arch"] == "mlp"


def test_hydra_prefix_layer_needs_target_configuration(tmp_path: Path) -> None:
    """The original format does not store it; ours does, so it is removed here."""
    head, folder = saved(tmp_path, "hydra", "hydra", prefix=True, num_heads_ahead=2)
    _, tensors = written(folder)
    layer = {f"prefix_embeding_layer.layers.0.{name}" for name in [*LAYER, "input_layernorm.weight"]}
    blocks = {f"hydra_mlp.{i}.1.{part}" for i in range(2) for part in ("linear", "res_connection")}
    both = {
        f"{name}.{part}" for name in {*blocks, "hydra_lm_head.0.1", "hydra_lm_head.1.1"} for part in ("weight", "bias")
    }
    assert set(tensors) == {*both, *layer, "prefix_embeding_layer.norm.weight"}

    def original(content: dict[str, Any], tensors: Tensors) -> None:
        del content["num_attention_heads"]
        tensors["input_embed_fn.weight"] = tensors["prefix_embeding_layer.embed_tokens.weight"] = torch.zeros(40, 24)

    rewrite(folder, original)
    with pytest.raises(CapabilityError, match="which is not known"):
        load_head(folder)
    assert gives_same_logits(head, load_head(folder, model=SMALL).head)


# -- what a layout cannot express ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "to", "changes", "text", "able"),
    [
        ("eagle3", "sglang", {"norm_before_residual": True}, "norm_before_residual", "draftwood, vllm, speculators"),
        ("eagle3", "sglang", {"taps": (0, 4, 6)}, "not the output of a layer", "draftwood, vllm, speculators"),
        ("eagle3", "sglang", {"own_embed": True}, "its own embeddings", "draftwood, eagle, vllm, speculators"),
        ("eagle3", "sglang", {"qk_norm": True}, "queries and keys", "draftwood, speculators"),
        ("eagle3", "vllm", {"fc_bias": True}, "fc has a bias", "draftwood, sglang"),
        ("eagle3", "vllm", {"qkv_bias": True}, "some biases", "draftwood"),
        ("eagle3", "vllm", {"taps": (6, 4, 2)}, "in ascending order", "draftwood"),
        ("eagle3", "sglang", {"taps": (6, 4, 2)}, "in ascending order", "draftwood"),
        ("eagle3", "speculators", {"taps": (2, 4, 4)}, "in ascending order", "draftwood"),
        ("eagle3", "speculators", {"own_lm_head": False}, "no lm_head", "draftwood, sglang, vllm"),
        ("eagle3", "speculators", {"target_name": ""}, "pass it with --model", "draftwood, eagle, sglang, vllm"),
        ("eagle3", "eagle", {"norm_output": True}, "norm_output", "draftwood, sglang, vllm, speculators"),
        ("eagle3", "eagle", {"num_layers": 2}, "2 layers", "draftwood, sglang, vllm, speculators"),
        ("eagle3", "eagle", {"taps": (1, 4, 6)}, r"reads \[1, 4, 6\]", "draftwood, sglang, vllm, speculators"),
        ("eagle3", "eagle", {"target_num_layers": 0}, "name it with --model", "draftwood, sglang, vllm, speculators"),
        ("eagle3", "eagle", {"rope": Rope(kind="llama3")}, "Llama 3.1", "draftwood, sglang, vllm, speculators"),
        ("eagle", "eagle", {"feature": "raw"}, "before the final norm", "draftwood"),
        ("eagle", "sglang", {}, "another kind", "draftwood, eagle"),
        ("eagle3", "medusa", {}, "another kind", "draftwood, eagle, sglang, vllm, speculators"),
        ("medusa", "medusa", {"feature": "raw"}, "before the final norm", "draftwood"),
        ("hydra", "hydra", {"prefix": True, "qk_norm": True}, "queries and keys", "draftwood"),
    ],
    ids=str,
)
def test_refused_exports(tmp_path: Path, kind: str, to: str, changes: dict[str, Any], text: str, able: str) -> None:
    head = random_head(kind, SMALL, **{"target_name": "org/target", **changes})
    with pytest.raises(CapabilityError, match=text) as caught:
        save_head(head, tmp_path / "head", to=to)
    assert f"allowed: {able}" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_target_determines_the_default_taps(tmp_path: Path) -> None:
    head = random_head("eagle3", SMALL, target_num_layers=0)
    save_head(head, tmp_path / "head", to="eagle", model=SMALL)


def test_unknown_layouts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no such layout"):
        save_head(random_head("eagle", SMALL), tmp_path / "head", to="eagel")
