"""``draftwood inspect head`` and ``draftwood export``: output, files and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from draftwood.cli.train.parser import LAYOUTS
from draftwood.heads import FORMATS, load_head, save_head
from draftwood.targets.tiny import TINY_CONFIG
from tests.tools.cli import Command, _plain_environment, draftwood_command  # noqa: F401 - fixtures
from tests.tools.head import SMALL, gives_same_logits, random_head


def model_folder(path: Path, **changes: Any) -> Path:
    """A folder with only the configuration of the small model."""
    path.mkdir()
    content = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 40,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 9,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        **changes,
    }
    (path / "config.json").write_text(json.dumps(content))
    return path


@pytest.fixture
def head_folder(tmp_path: Path) -> Path:
    return save_head(random_head("eagle3", SMALL, draft_vocab_size=17, target_name="org/small"), tmp_path / "head")


# -- inspect head ----------------------------------------------------------------------------------------------------


def test_inspect_describes_the_head(draftwood_command: Command, head_folder: Path) -> None:
    result = draftwood_command("inspect", "head", str(head_folder))
    assert result.code == 0
    assert result.err == ""
    lines = dict(line.split("  ", 1) for line in result.out.splitlines())
    facts = {name.strip(): text.strip() for name, text in lines.items()}
    assert facts == {
        "kind": "eagle3, layout draftwood",
        "parameters": "0.0 million in float32",
        "layers": "1, hidden size 24, 4 heads, 2 KV heads, head size 6",
        "reads": "the hidden states 2, 4, 6 of size 24",
        "vocabulary": "17 of 40 tokens",
        "target model": "org/small",
    }


def test_inspect_as_json(draftwood_command: Command, head_folder: Path) -> None:
    result = draftwood_command("inspect", "head", str(head_folder), "--json")
    content = json.loads(result.out)
    head = load_head(head_folder).head
    assert content["format"] == "draftwood"
    assert content["num_parameters"] == head.num_parameters() == sum(p.numel() for p in head.parameters())
    assert content["taps"] == [2, 4, 6]
    assert content["dtype"] == "float32"
    assert content["fits"] is content["misfits"] is content["model"] is None
    assert content["config"]["draft_vocab_size"] == 17
    assert content["config"]["rope"]["theta"] == 500.0


def test_inspect_compares_with_a_model(draftwood_command: Command, head_folder: Path, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "small")
    result = draftwood_command("inspect", "head", str(head_folder), "--model", str(model), "--json")
    assert result.code == 0
    assert json.loads(result.out)["fits"] is True
    result = draftwood_command("inspect", "head", str(head_folder), "--model", "tiny")
    assert result.code == 1
    last = result.out.splitlines()[-1]
    assert last.startswith("fits tiny")
    assert "hidden size: the head needs 24, the target has 48" in last
    assert "vocabulary: the head needs 40 tokens, the target has 258" in last
    assert "[4, 6]" in last
    content = json.loads(draftwood_command("inspect", "head", str(head_folder), "--model", "tiny", "--json").out)
    assert content["fits"] is False
    assert len(content["misfits"]) == 4


def test_inspect_supports_transformers_only_models(
    draftwood_command: Command, head_folder: Path, tmp_path: Path
) -> None:
    model = model_folder(tmp_path / "other", architectures=["GemmaForCausalLM"], vocab_size=41)
    result = draftwood_command("inspect", "head", str(head_folder), "--model", str(model))
    assert result.code == 1
    assert "the target has 41" in result.out


def test_default_taps_depend_on_the_model(draftwood_command: Command, tmp_path: Path) -> None:
    folder = save_head(random_head("eagle3", SMALL), tmp_path / "head", to="eagle")
    assert "the default ones of its model" in draftwood_command("inspect", "head", str(folder)).out
    model = model_folder(tmp_path / "model", num_hidden_layers=32)
    result = draftwood_command("inspect", "head", str(folder), "--model", str(model))
    assert "the hidden states 2, 16, 29" in result.out
    assert result.code == 0


@pytest.mark.parametrize(
    ("kind", "changes", "texts"),
    [
        ("eagle", {}, ["the last hidden state of size 24, after the final norm", "40 of 40 tokens"]),
        ("eagle", {"feature": "raw"}, ["before the final norm"]),
        ("medusa", {}, ["predicts", "4 tokens ahead, 1 residual block each"]),
        ("hydra", {"prefix": True, "num_residual": 2}, ["2 residual blocks each", "1, hidden size 24"]),
        ("eagle3", {"norm_output": True, "fc_norm": True}, ["variant", "one norm per tap, feeds back normed output"]),
    ],
)
def test_other_kinds(
    draftwood_command: Command, tmp_path: Path, kind: str, changes: dict[str, Any], texts: list[str]
) -> None:
    folder = save_head(random_head(kind, SMALL, **changes), tmp_path / "head")
    out = draftwood_command("inspect", "head", str(folder)).out
    assert all(text in out for text in texts), out


def test_prefix_layer_needs_the_target_model(draftwood_command: Command, tmp_path: Path) -> None:
    folder = save_head(random_head("hydra", SMALL, prefix=True), tmp_path / "head", to="hydra")
    content = json.loads((folder / "config.json").read_text())
    del content["num_attention_heads"]  # as in the original
    (folder / "config.json").write_text(json.dumps(content))
    result = draftwood_command("inspect", "head", str(folder))
    assert result.code == 2
    assert "Name the target: --model" in result.err
    model = model_folder(tmp_path / "model")
    assert draftwood_command("inspect", "head", str(folder), "--model", str(model)).code == 0


def test_errors_come_without_a_stack_trace(draftwood_command: Command, head_folder: Path, tmp_path: Path) -> None:
    for argv, text in (
        ((str(tmp_path / "nowhere"),), "There is no such folder"),
        ((str(tmp_path),), "no config.json"),
        ((str(head_folder), "--model", str(tmp_path)), "no config.json"),
        ((str(head_folder), "--model", "nobody-knows-it"), "no model of this name"),
    ):
        result = draftwood_command("inspect", "head", *argv)
        assert result.code == 2
        assert text in result.err
        assert "Traceback" not in result.err
        assert result.out == ""
    save_file({}, head_folder / "model.safetensors")
    result = draftwood_command("inspect", "head", str(head_folder))
    assert result.code == 2
    assert "missing: d2t, fc.weight, lm_head.weight, midlayer" in result.err


# -- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["eagle", "sglang", "vllm", "speculators", "draftwood"])
def test_export(draftwood_command: Command, head_folder: Path, tmp_path: Path, to: str) -> None:
    out = tmp_path / "out"
    result = draftwood_command("export", str(head_folder), "--to", to, "--out", str(out))
    assert result.code == 0
    assert result.out == f"{out}: eagle3 head in the layout {to} (config.json, model.safetensors)\n"
    exported = load_head(out)
    assert exported.format == to
    assert gives_same_logits(load_head(head_folder).head, exported.head)


def test_export_as_json_and_back(draftwood_command: Command, tmp_path: Path) -> None:
    head = random_head("medusa", SMALL)
    folder = save_head(head, tmp_path / "head")
    result = draftwood_command("export", str(folder), "--to", "medusa", "--out", str(tmp_path / "out"), "--json")
    content = json.loads(result.out)
    assert content["files"] == ["config.json", "medusa_lm_head.pt"]
    assert content["from_format"] == "draftwood"
    result = draftwood_command(
        "export", str(tmp_path / "out"), "--to", "draftwood", "--out", str(tmp_path / "back"), "--json"
    )
    assert json.loads(result.out)["from_format"] == "medusa"
    assert gives_same_logits(head, load_head(tmp_path / "back").head)


def test_verifier_name(draftwood_command: Command, tmp_path: Path) -> None:
    folder = save_head(random_head("eagle3", SMALL), tmp_path / "head")
    refused = draftwood_command("export", str(folder), "--to", "speculators", "--out", str(tmp_path / "out"))
    assert refused.code == 2
    assert "pass it with --model" in refused.err
    result = draftwood_command(
        "export", str(folder), "--to", "speculators", "--out", str(tmp_path / "out"), "--model", "org/not-fetched"
    )
    assert result.code == 0
    verifier = json.loads((tmp_path / "out" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "org/not-fetched", "architectures": []}


def test_local_model_gives_architecture_and_must_fit(draftwood_command: Command, tmp_path: Path) -> None:
    folder = save_head(random_head("eagle3", SMALL), tmp_path / "head")
    model, out = model_folder(tmp_path / "model"), tmp_path / "out"
    draftwood_command("export", str(folder), "--to", "speculators", "--out", str(out), "--model", str(model))
    verifier = json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(model), "architectures": ["LlamaForCausalLM"]}
    result = draftwood_command(
        "export", str(folder), "--to", "sglang", "--out", str(tmp_path / "no"), "--model", "tiny"
    )
    assert result.code == 2
    assert f"the target has {TINY_CONFIG.hidden_size}" in result.err
    assert not (tmp_path / "no").exists()


def test_invalid_requests_are_refused(draftwood_command: Command, head_folder: Path, tmp_path: Path) -> None:
    odd = save_head(random_head("eagle3", SMALL, norm_before_residual=True), tmp_path / "odd")
    result = draftwood_command("export", str(odd), "--to", "sglang", "--out", str(tmp_path / "out"))
    assert result.code == 2
    assert "norm_before_residual" in result.err
    assert "allowed: draftwood, vllm" in result.err
    assert not (tmp_path / "out").exists()
    for argv, text in (
        ((str(head_folder), "--to", "eagle", "--out", str(odd)), "--force"),
        ((str(head_folder), "--to", "eagle", "--out", str(head_folder), "--force"), "cannot replace itself"),
        ((str(head_folder), "--to", "onnx", "--out", str(tmp_path / "out")), "invalid choice"),
        ((str(tmp_path / "nowhere"), "--to", "eagle", "--out", str(tmp_path / "out")), "There is no such folder"),
    ):
        result = draftwood_command("export", *argv)
        assert result.code == 2
        assert text in result.err
        assert "Traceback" not in result.err
    assert draftwood_command("export", str(head_folder), "--to", "eagle", "--out", str(odd), "--force").code == 0
    assert load_head(odd).format == "eagle"


@pytest.mark.parametrize("argv", [("inspect", "head"), ("export",)], ids=str)
def test_help_has_examples(draftwood_command: Command, argv: tuple[str, ...]) -> None:
    result = draftwood_command(*argv, "--help")
    assert result.code == 0
    assert f"examples:\n  draftwood {' '.join(argv)}" in result.out


def test_every_layout_is_an_option() -> None:
    assert sorted(LAYOUTS) == sorted(FORMATS)
