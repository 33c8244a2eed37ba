"""Checkpoints of heads that are damaged, incomplete, or in unusual files; saving over existing folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftwood.errors import DraftwoodError, ModelError, OptionError
from draftwood.heads import load_head, save_head
from tests.tools.head import SMALL, Tensors, gives_same_logits, random_head, rewrite, saved, written

VOCABULARY = {"draft_vocab_size": 17}


def damage(**tensors: Any) -> Callable[[dict[str, Any], Tensors], None]:
    def change(content: dict[str, Any], stored: Tensors) -> None:
        for name, value in tensors.items():
            stored[name] = value

    return change


@pytest.mark.parametrize("to", ["eagle", "sglang", "vllm", "speculators", "draftwood"])
def test_all_mismatches_are_listed(tmp_path: Path, to: str) -> None:
    _, folder = saved(tmp_path, "eagle3", to, **VOCABULARY)
    first = "layers.0" if to == "speculators" else "midlayer"

    def change(content: dict[str, Any], tensors: Tensors) -> None:
        del tensors["norm.weight"], tensors[f"{first}.mlp.up_proj.weight"]
        tensors["norm_typo.weight"] = torch.ones(3)
        tensors["layers.7.mlp.up_proj.weight"] = torch.ones(3)
        tensors["lm_head.weight"] = torch.ones(16, 24)
        tensors["fc.weight"] = torch.ones(24)

    with pytest.raises(ModelError) as caught:
        load_head(rewrite(folder, change))
    text = str(caught.value)
    assert f"missing: {first}.mlp.up_proj.weight, norm.weight;" in text
    assert "unknown: layers.7.mlp.up_proj.weight, norm_typo.weight" in text
    assert "lm_head.weight is [16, 24] and must be [17, 24]" in text
    assert "fc.weight is [24] and must be [24, 72]" in text


@pytest.mark.parametrize(
    ("kind", "to", "gone"),
    [
        ("eagle", "eagle", "fc.bias"),
        ("medusa", "medusa", "1.1.weight"),
        ("medusa", "medusa", "0.0.linear.weight"),
        ("hydra", "hydra", "hydra_mlp.2.0.res_connection.bias"),
        ("hydra", "hydra", "hydra_lm_head.0.weight"),
        ("eagle3", "eagle", "t2d"),
        ("eagle3", "sglang", "d2t"),
        ("eagle3", "speculators", "lm_head.weight"),
        ("eagle3", "eagle", "midlayer.hidden_norm.weight"),
    ],
)
def test_one_missing_tensor(tmp_path: Path, kind: str, to: str, gone: str) -> None:
    changes = VOCABULARY if kind == "eagle3" else {}
    _, folder = saved(tmp_path, kind, to, **changes)
    with pytest.raises(ModelError, match=f"missing: {gone}"):
        load_head(rewrite(folder, lambda _, tensors: tensors.__delitem__(gone)))


@pytest.mark.parametrize("to", ["eagle", "sglang", "speculators"])
def test_copy_of_target_embeddings_is_ignored(tmp_path: Path, to: str) -> None:
    head, folder = saved(tmp_path, "eagle3", to)
    rewrite(folder, damage(**{"embed_tokens.weight": torch.zeros(40, 24)}))
    loaded, config, _ = load_head(folder)
    assert not config.own_embed
    assert gives_same_logits(head, loaded)
    rewrite(folder, damage(**{"embed_tokens.weight": torch.zeros(39, 24)}))
    with pytest.raises(ModelError, match=r"embed_tokens.weight is \[39, 24\] and must be \[40, 24\]"):
        load_head(folder)


def test_extra_tensors_of_eagle1_heads(tmp_path: Path) -> None:
    head, folder = saved(tmp_path, "eagle", "eagle")
    copies = {"embed_tokens.weight": torch.zeros(40, 24), "lm_head.weight": torch.zeros(40, 24)}
    extra = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    rewrite(folder, damage(**copies, **extra))
    assert gives_same_logits(head, load_head(folder).head)
    rewrite(folder, damage(**{"layers.0.input_layernorm.weight": torch.ones(24)}))
    with pytest.raises(ModelError, match=r"unknown: layers\.0\.input_layernorm\.weight"):
        load_head(folder)


def test_shared_blocks_must_be_equal(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, "medusa", "medusa", num_residual=2)
    rewrite(folder, damage(**{"1.1.linear.weight": torch.ones(24, 24)}))
    with pytest.raises(ModelError, match=r"1\.1\.linear\.weight differs from 1\.0\.linear\.weight"):
        load_head(folder)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"d2t": torch.zeros(17)}, "whole numbers"),
        ({"d2t": torch.full((17,), 30)}, "not a draft vocabulary"),
        ({"d2t": -torch.arange(17)}, "not a draft vocabulary"),
        ({"d2t": torch.zeros(17, dtype=torch.int64)}, "do not belong together"),
        ({"t2d": torch.ones(40, dtype=torch.bool)}, "t2d has 40 tokens, 17 of them in d2t"),
    ],
    ids=str,
)
def test_damaged_vocabularies(tmp_path: Path, tensors: Tensors, text: str) -> None:
    _, folder = saved(tmp_path, "eagle3", "eagle", **VOCABULARY)
    with pytest.raises(ModelError, match=text):
        load_head(rewrite(folder, damage(**tensors)))


def test_full_vocabulary_map_must_be_identity(tmp_path: Path) -> None:
    head, folder = saved(tmp_path, "eagle3", "sglang")
    idle = {"d2t": torch.zeros(40, dtype=torch.int64), "t2d": torch.ones(40, dtype=torch.bool)}
    assert gives_same_logits(head, load_head(rewrite(folder, damage(**idle))).head)
    with pytest.raises(ModelError, match="as many as its target"):
        load_head(rewrite(folder, damage(d2t=torch.ones(40, dtype=torch.int64))))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": 0}, "invalid hidden_size"),
        ({"hidden_size": 1e308}, "invalid hidden_size"),
        ({"hidden_size": float("inf")}, "invalid hidden_size"),
        ({"intermediate_size": 2**63}, "invalid intermediate_size"),
        ({"draft_vocab_size": 10**40}, "invalid draft_vocab_size"),
        ({"draft_vocab_size": None}, "draft_vocab_size"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size"),
        ({"num_attention_heads": 3}, "num_key_value_heads"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope variant yarn"),
        ({"sliding_window": 8}, "sliding window"),
        ({"logit_scale": 0.5}, "logits are scaled"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "last hidden state"),
        ({"eagle_aux_hidden_state_layer_ids": [1, "2"]}, "invalid eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2], "num_aux_hidden_states": 3}, "taps is"),
        ({"norm_before_fc": True}, "missing: input_norm.weight"),
        ({"attention_bias": True}, "missing: midlayer.self_attn.k_proj.bias"),
        ({"num_hidden_layers": 2}, "missing: layers.1"),
    ],
    ids=str,
)
def test_damaged_configurations(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    _, folder = saved(tmp_path, "eagle3", "eagle", **VOCABULARY)
    with pytest.raises(DraftwoodError, match=text):
        load_head(rewrite(folder, lambda content, _: content.update(change)))


@pytest.mark.parametrize(
    ("kind", "to", "change", "text"),
    [
        ("hydra", "hydra", {"hydra_head_arch": "eagle-attn"}, "hydra_head_arch eagle-attn"),
        ("hydra", "hydra", {"grounded_heads": False, "hidden_state_offset": 2}, "hidden_state_offset 2"),
        ("medusa", "medusa", {"medusa_num_heads": 3}, r"unknown: 3\.0\.linear\.bias, 3\.0\.linear\.weight, 3"),
        ("eagle3", "speculators", {"speculators_model_type": "dflash"}, "dflash"),
        ("eagle3", "speculators", {"transformer_layer_config": None}, "lacks 'transformer_layer_config'"),
        ("eagle3", "draftwood", {"draftwood": {"version": 7}}, "another version"),
        ("eagle3", "draftwood", {"draftwood": {"version": 1, "colour": "red"}}, r"unknown fields \['colour'\]"),
        ("eagle3", "draftwood", {"draftwood": {"version": 1, "kind": "eagle3"}}, "damaged"),
        ("eagle3", "draftwood", {"draftwood": "yes"}, "another version"),
    ],
    ids=str,
)
def test_other_damaged_configurations(tmp_path: Path, kind: str, to: str, change: dict[str, Any], text: str) -> None:
    _, folder = saved(tmp_path, kind, to)
    with pytest.raises(DraftwoodError, match=text):
        load_head(rewrite(folder, lambda content, _: content.update(change)))


def test_speculators_norm_residual_by_default(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, "eagle3", "speculators")
    assert not load_head(folder).config.norm_before_residual
    rewrite(folder, lambda content, _: content.__delitem__("norm_before_residual"))
    assert load_head(folder).config.norm_before_residual


def test_a_model_is_not_a_head(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    save_file({"model.embed_tokens.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="known kind of head"):
        load_head(folder)


# -- files -----------------------------------------------------------------------------------------------------------


def split(tensors: Tensors) -> list[Tensors]:
    names = sorted(tensors)
    return [{name: tensors[name].clone() for name in names[part::2]} for part in range(2)]


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("ending", ["bin", "safetensors"])
def test_bin_files_and_shards(tmp_path: Path, ending: str, shards: bool) -> None:
    head, folder = saved(tmp_path, "eagle3", "eagle", **VOCABULARY)
    _, tensors = written(folder)
    (folder / "model.safetensors").unlink()
    stem = "pytorch_model" if ending == "bin" else "model"
    parts = split(tensors) if shards else [tensors]
    names = [f"{stem}-{i + 1}-of-2.{ending}" if shards else f"{stem}.{ending}" for i in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        torch.save(part, folder / name) if ending == "bin" else save_file(part, folder / name)
    if shards:
        weight_map = {name: file for file, part in zip(names, parts, strict=True) for name in part}
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert gives_same_logits(head, load_head(folder).head)
    if shards:
        (folder / names[1]).unlink()
        with pytest.raises(ModelError, match=f"Shards of the head are missing\n  got: {names[1]}"):
            load_head(folder)


class Intruder:
    """A pickle that would run something."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("intruded"),))


def test_pickle_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, folder = saved(tmp_path, "eagle3", "eagle")
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Intruder()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="never run"):
        load_head(folder)
    assert not (tmp_path / "intruded").exists()


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("model.safetensors", b"nothing of the kind", "model.safetensors cannot be read"),
        ("pytorch_model.bin", b"nothing of the kind", "pytorch_model.bin cannot be read"),
        ("pytorch_model.bin", b"", "pytorch_model.bin cannot be read"),
        ("model.safetensors.index.json", b"{", "not valid JSON"),
        ("model.safetensors.index.json", b"{}", "which file holds which tensor"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../b"}}', "which file holds which tensor"),
        ("elsewhere.safetensors", b"", "has no weights"),
        ("config.json", b"[]", "must contain a JSON object"),
    ],
)
def test_unreadable_files_are_reported(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    _, folder = saved(tmp_path, "eagle3", "eagle")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=text):
        load_head(folder)


def test_a_list_of_tensors_is_refused(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, "eagle3", "eagle")
    (folder / "model.safetensors").unlink()
    torch.save([torch.ones(2)], folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="must contain tensors by name"):
        load_head(folder)


def test_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        load_head(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_head(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="Did you mean its folder"):
        load_head(tmp_path / "file")


def test_a_folder_is_replaced_only_by_force_and_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, folder = saved(tmp_path, "eagle3", "eagle")
    new = random_head("medusa", SMALL)
    with pytest.raises(OptionError, match="--force"):
        save_head(new, folder)

    def fail(tensors: Tensors, path: Path) -> None:
        path.write_text("half of it")
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("draftwood.heads.formats.files.save_file", fail)
        with pytest.raises(DraftwoodError, match="the disk is full"):
            save_head(new, folder, force=True)
    assert gives_same_logits(old, load_head(folder).head)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
    save_head(new, folder, force=True)
    assert load_head(folder).config.kind == "medusa"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_a_head_is_not_saved_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OptionError, match="this is a file"):
        save_head(random_head("eagle", SMALL), tmp_path / "file", force=True)
