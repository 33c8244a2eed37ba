"""Shipped heads: which target uses one by default, their names, and the real head."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from draftwood import LLM, SamplingParams
from draftwood.cli.inspect.parser import SHIPPED
from draftwood.config import DEFAULT_MODEL, ModelOptions
from draftwood.disk.toml import read_toml
from draftwood.drafters import check_drafter, make_factory
from draftwood.errors import ModelError, OptionError
from draftwood.heads import check_fit, find_head, find_shipped_head, list_shipped_heads, load_head, save_head
from draftwood.heads import shipped as shipping
from draftwood.heads.fit import was_trained_for
from draftwood.heads.target import find_local_fingerprint, fingerprint, load_target_shape
from draftwood.models.find import ModelFolder
from draftwood.models.tensors import tensor_shapes
from draftwood.targets.load import load_target
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.native.weights import assemble
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from draftwood.text.bytes import ByteTokenizer
from tests.tools.cli import SHORT, TINY, Command, _plain_environment, draftwood_command  # noqa: F401 - fixtures
from tests.tools.gguf_writer import toy_model, write_gguf
from tests.tools.head import random_head
from tests.tools.model_cache import home  # noqa: F401 - a fixture
from tests.tools.paths import ROOT

NAME = "tiny-eagle3"
REAL = shipping.FOLDER / SHIPPED
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the head for the default model is not trained yet")
MOST_BYTES = 25_000_000


def tiny_head(**changes: Any) -> Any:
    """A random head with the fingerprint of the built-in model."""
    facts = {"target_name": "tiny", "target_fingerprint": find_local_fingerprint("tiny"), "draft_vocab_size": 100}
    return random_head("eagle3", TINY_CONFIG, **{**facts, **changes})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of shipped heads."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(shipping, "FOLDER", folder)
    return folder


@pytest.fixture
def shipped(place: Path) -> Path:
    folder = save_head(tiny_head(), place / NAME)
    (folder / "README.md").write_text("# A head\n\nLicence: Apache-2.0\n")
    return folder


def llm_with(target: Any = None, drafter: str = "eagle3", **options: Any) -> LLM:
    return LLM.from_target(target or tiny_target(), ByteTokenizer(), drafter=drafter, drafter_options=options, budget=8)


def head_of(llm: LLM) -> Any:
    return llm._default._shared.model._head


def tiny_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights for the shape of the built-in model."""
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(TINY_CONFIG).items()
    return {name: 1.0 + 0.5 * torch.randn(shape, generator=generator) for name, shape in shapes}


def named(name: str, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> NativeTarget:
    return NativeTarget(name, TINY_CONFIG, assemble(TINY_CONFIG, lambda each: tensors[each].to(dtype)), 2048)


# -- which target it is for ------------------------------------------------------------------------------------------


def test_matching_target_uses_shipped_head_by_default(shipped: Path) -> None:
    llm = llm_with(quantize=False)  # in 8 bits the head does not keep its matrices
    params = SamplingParams(max_tokens=16)
    (result,) = llm.generate("Hello, hello.", params)
    (plain,) = llm.generate("Hello, hello.", params, drafter="plain")
    assert result.token_ids == plain.token_ids
    assert result.stats.drafted_nodes > 0
    stored = load_head(shipped).head.state_dict()
    used = head_of(llm).state_dict()
    assert all(torch.equal(used[name], tensor) for name, tensor in stored.items())


def test_other_model_of_same_shape_does_not_use_shipped_head(shipped: Path) -> None:
    with pytest.raises(OptionError) as caught:
        llm_with(tiny_target(seed=1))
    message = str(caught.value)
    for text in ("'eagle3' needs a head", f"{NAME} (made for tiny)", "docs/training.md", "--drafter-option head="):
        assert text in message, message
    assert head_of(llm_with(tiny_target(seed=1), head=NAME)).config.target_name == "tiny"  # if requested explicitly


def test_head_is_matched_by_fingerprint_not_name(place: Path) -> None:
    tensors = tiny_tensors()
    mark = fingerprint(tensors["model.norm.weight"])
    save_head(tiny_head(target_name="original", target_fingerprint=mark), place / NAME)
    assert head_of(llm_with(named("copy-of-it", tensors))) is not None
    tuned = {**tensors, "model.norm.weight": tensors["model.norm.weight"].clone()}
    tuned["model.norm.weight"][7] *= 1 + 2**-6  # two steps of bfloat16 in one weight
    with pytest.raises(OptionError, match="none ships for original"):
        llm_with(named("original", tuned))


def test_a_head_without_a_fingerprint_matches_no_target(place: Path) -> None:
    save_head(tiny_head(target_fingerprint=""), place / NAME)
    with pytest.raises(OptionError, match="none ships for tiny"):
        llm_with()


def test_shape_must_match_too(place: Path) -> None:
    mark = find_local_fingerprint("tiny")
    deeper = replace(TINY_CONFIG, num_layers=9)
    save_head(random_head("eagle3", deeper, target_fingerprint=mark), place / "deeper")
    assert find_shipped_head("eagle3", TINY_CONFIG, mark) is None
    found = find_shipped_head("eagle3", deeper, mark)
    assert found is not None
    assert found.name == "deeper"
    assert find_shipped_head("eagle", deeper, mark) is None
    assert find_shipped_head("eagle3", deeper, fingerprint(torch.ones(48))) is None


@given(st.lists(st.floats(2**-10, 2**10, width=16), min_size=1, max_size=64), st.integers(0, 63))
def test_a_fingerprint_depends_on_weights_and_not_on_number_formats(values: list[float], at: int) -> None:
    norm = torch.tensor(values).bfloat16()  # like published weights
    formats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    assert len({fingerprint(norm.to(dtype)) for dtype in formats}) == 1
    changed = norm.clone()
    changed[at % len(norm)] *= 1 + 2**-6
    assert fingerprint(changed) != fingerprint(norm)
    assert fingerprint(norm.repeat(2)) != fingerprint(norm)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_file_has_the_fingerprint_of_its_weights(tmp_path: Path, dtype: str) -> None:
    toy = toy_model()
    norm = torch.from_numpy(toy.expected["model.norm.weight"])
    for name in ("one.gguf", "other.gguf"):
        file = write_gguf(tmp_path / name, toy.metadata, toy.tensors)
        loaded = load_target(ModelOptions(model=file, dtype=dtype, device="cpu", cache_tokens=256))
        assert fingerprint(loaded.target.parts().norm) == fingerprint(norm)
        assert find_local_fingerprint(loaded.target.info.name) == fingerprint(norm)  # from its folder in the cache


def test_no_fingerprint_without_weights(tmp_path: Path) -> None:
    assert find_local_fingerprint("nobody/knows-it") == ""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GemmaForCausalLM"]} | _SIZES))
    assert find_local_fingerprint(str(tmp_path)) == ""  # not one of our models
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | _SIZES))
    assert find_local_fingerprint(str(tmp_path)) == ""  # no weights
    (tmp_path / "model.safetensors").write_bytes(b"half of it")
    with pytest.raises(ModelError, match="cannot be read"):
        find_local_fingerprint(str(tmp_path))
    save_file({"model.embed_tokens.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"do not fit config.json\n  got: missing: .*model\.norm\.weight"):
        find_local_fingerprint(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    config = tiny_head().config
    assert was_trained_for(config, "tiny") is True
    assert was_trained_for(config, str(tmp_path)) is None
    assert was_trained_for(replace(config, target_fingerprint=""), "tiny") is None
    assert was_trained_for(replace(config, target_fingerprint="0" * 16), "tiny") is False


_SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}


# -- which drafter uses it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["eagle", "eagle2", "hass", "griffin", "medusa", "hydra"])
def test_other_drafters_are_refused_before_a_model_is_loaded(shipped: Path, drafter: str) -> None:
    with pytest.raises(OptionError, match="needs a head"):
        LLM("no-such-model", drafter=drafter)
    with pytest.raises(OptionError, match="needs a head"):
        make_factory(drafter, None, tiny_target(), codec=ByteTokenizer())


def test_shipped_head_is_known_before_model_loads(place: Path) -> None:
    with pytest.raises(OptionError, match="needs a head"):
        check_drafter("eagle3", None)
    save_head(tiny_head(), place / NAME)
    check_drafter("eagle3", None)


# -- names -----------------------------------------------------------------------------------------------------------


def test_shipped_head_is_found_by_name(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(head.name, head.config.kind) for head in list_shipped_heads()] == [(NAME, "eagle3")]
    assert list_shipped_heads("eagle") == []
    own = save_head(tiny_head(draft_vocab_size=50), tmp_path / NAME)
    monkeypatch.chdir(tmp_path)
    assert find_head(NAME) == shipped
    assert find_head(f"./{NAME}").resolve() == own.resolve()
    assert find_head(own) == own
    assert head_of(llm_with(head=NAME)).config.draft_vocab_size == 100
    assert head_of(llm_with(head=f"./{NAME}")).config.draft_vocab_size == 50


def test_unknown_names_are_refused_before_a_model_is_loaded(shipped: Path) -> None:
    with pytest.raises(ModelError, match=f"no head of this name ships(.|\n)*tiny-eagl\n(.|\n)*{NAME}"):
        LLM("no-such-model", drafter="eagle3", drafter_options={"head": "tiny-eagl"})


def test_other_folders_are_not_listed(place: Path) -> None:
    (place / "notes").mkdir()
    (place / "readme.txt").write_text("")
    assert list_shipped_heads() == []
    assert list_shipped_heads("eagle3") == []


# -- the command -----------------------------------------------------------------------------------------------------


def test_command_generates_inspects_and_checks(shipped: Path, draftwood_command: Command, tmp_path: Path) -> None:
    plain = draftwood_command("generate", "hello", *SHORT, "--drafter", "plain")
    result = draftwood_command("generate", "hello", *SHORT, "--drafter", "eagle3")
    assert (result.code, result.out) == (0, plain.out)
    tree = draftwood_command("inspect", "tree", "hello", *TINY, "--drafter", "eagle3", "--cycles", "1")
    assert (tree.code, "eagle3" in tree.out) == (0, True)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    assert draftwood_command("check", "--prompts", str(prompts), *SHORT, "--drafter", "eagle3").code == 0


def test_command_benchmarks_shipped_head(shipped: Path, draftwood_command: Command, tmp_path: Path) -> None:
    chosen = ("--drafters", "plain,eagle3", "--tasks", "chat", "--limit", "1", "--out", str(tmp_path / "run"))
    result = draftwood_command("bench", *SHORT, *chosen, "--json")
    assert result.code == 0, result.err
    lines = (tmp_path / "run" / "requests.jsonl").read_text().splitlines()
    assert {json.loads(line)["method"] for line in lines} == {"plain", "eagle3"}
    assert {json.loads(line)["error"] for line in lines} == {None}


def test_command_lists_shipped_head(shipped: Path, draftwood_command: Command) -> None:
    assert draftwood_command("drafters").out.count(f"ships with the head {NAME} (made for tiny)") == 1
    listed = json.loads(draftwood_command("drafters", "--json").out)["drafters"]
    assert {name: about["heads"] for name, about in listed.items() if about["heads"]} == {"eagle3": [NAME]}


def test_inspect_by_name(shipped: Path, draftwood_command: Command) -> None:
    result = draftwood_command("inspect", "head", NAME, "--model", "tiny")
    assert result.code == 0
    assert f"model card      {shipped / 'README.md'}" in result.out
    assert result.out.endswith("trained for it  yes\n")
    content = json.loads(draftwood_command("inspect", "head", NAME, "--json").out)
    assert content["path"] == str(shipped)
    assert content["trained_for_it"] is None


def test_inspect_shows_the_default_models(place: Path, shipped: Path, draftwood_command: Command) -> None:
    missing = draftwood_command("inspect", "head")
    assert (missing.code, SHIPPED in missing.err) == (2, True)
    shutil.copytree(shipped, place / SHIPPED)
    assert str(place / SHIPPED) in draftwood_command("inspect", "head").out


def test_export_by_name(shipped: Path, draftwood_command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert draftwood_command("export", NAME, "--out", str(out), "--to", "vllm").code == 0
    assert load_head(out).format == "vllm"
    again = draftwood_command("export", NAME, "--out", str(shipped), "--to", "draftwood", "--force")
    assert (again.code, "cannot replace itself" in again.err) == (2, True)


def test_trained_head_becomes_shipped_head(place: Path, draftwood_command: Command, tmp_path: Path) -> None:
    """The export command creates the folder: half the size, with the target's fingerprint."""
    best = save_head(tiny_head(target_fingerprint="", target_name=""), tmp_path / "best")
    wanted = ("--to", "draftwood", "--dtype", "bfloat16", "--model", "tiny")
    assert draftwood_command("export", str(best), "--out", str(place / NAME), *wanted).code == 0
    tensors, before = (load_file(folder / "model.safetensors") for folder in (place / NAME, best))
    assert {str(t.dtype) for t in tensors.values() if t.is_floating_point()} == {"torch.bfloat16"}
    assert all(torch.equal(tensors[name], t.bfloat16() if t.is_floating_point() else t) for name, t in before.items())
    (head,) = list_shipped_heads("eagle3")
    assert (head.config.target_name, head.config.target_fingerprint) == ("tiny", find_local_fingerprint("tiny"))
    assert head_of(llm_with()).config == head.config


def test_export_keeps_the_fingerprint(shipped: Path, draftwood_command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert (
        draftwood_command("export", NAME, "--out", str(out), "--to", "draftwood", "--model", "nobody/knows-it").code
        == 0
    )
    config = load_head(out).config
    assert (config.target_name, config.target_fingerprint) == ("nobody/knows-it", find_local_fingerprint("tiny"))


def test_export_keeps_the_number_format_by_default(shipped: Path, draftwood_command: Command, tmp_path: Path) -> None:
    assert draftwood_command("export", NAME, "--out", str(tmp_path / "out"), "--to", "vllm").code == 0
    assert next(load_head(tmp_path / "out").head.parameters()).dtype == torch.float32


# -- the package, and the real head ----------------------------------------------------------------------------------


def test_package_includes_shipped_heads() -> None:
    project = read_toml(ROOT / "pyproject.toml", "project")
    patterns = project["tool"]["setuptools"]["package-data"]["draftwood"]
    for name in ("config.json", "model.safetensors", "README.md"):
        path = PurePath("heads/shipped") / SHIPPED / name
        assert any(path.match(pattern) for pattern in patterns), name


@needs_real
def test_the_real_head_is_small_and_documented() -> None:
    files = {path.name: path for path in REAL.iterdir()}
    assert set(files) == {"config.json", "model.safetensors", "README.md"}
    assert sum(path.stat().st_size for path in files.values()) <= MOST_BYTES
    head, config, layout = load_head(REAL)
    assert (config.kind, layout, config.target_name) == ("eagle3", "draftwood", DEFAULT_MODEL)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    assert all(bool(parameter.isfinite().all()) for parameter in head.parameters())
    card = files["README.md"].read_text(encoding="utf-8")
    for text in ("licence", "apache-2.0", "data", "steps", "tau"):
        assert text in card.lower().replace("license", "licence"), text


@needs_real
@pytest.mark.model
def test_the_real_head_is_for_the_default_model(smollm2: ModelFolder) -> None:
    config = load_head(REAL).config
    assert check_fit(config, load_target_shape(DEFAULT_MODEL)) == []
    assert was_trained_for(config, DEFAULT_MODEL) is True


@needs_real
@pytest.mark.model
def test_real_head_drafts_well_and_keeps_output(smollm2: ModelFolder) -> None:
    params = SamplingParams(max_tokens=24)
    prompts = ["Explain why the sky is blue.", "Write a Python function that adds two numbers."]
    with LLM(drafter="eagle3", dtype="float32", device="cpu", budget=16, max_batch=2, cache_tokens=4096) as llm:
        chats = [llm.tokenizer.apply_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
        results = llm.generate(chats, params)
        plain = llm.generate(chats, params, drafter="plain")
    assert [each.token_ids for each in results] == [each.token_ids for each in plain]
    emitted, cycles = (sum(getattr(each.stats, name) for each in results) for name in ("output_tokens", "cycles"))
    assert emitted / cycles > 1.5
