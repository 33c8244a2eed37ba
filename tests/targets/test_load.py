"""Loading a target from user options: unavailable models, devices and cache sizes give clear errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftwood import LLM
from draftwood.config import ModelOptions
from draftwood.errors import CapabilityError, DraftwoodError, ModelError, OptionError, PromptError
from draftwood.models.catalog import describe
from draftwood.models.find import resolve
from draftwood.sizing.costs import LARGEST_TREE
from draftwood.targets.load import COMPILING, load_target, pick_device
from draftwood.targets.native.cpu import CpuDecoder
from draftwood.targets.native.cpu.records import FORMATS
from draftwood.targets.room import MAX_CACHE_TOKENS, check_room, default_cache_tokens, out_of_memory
from draftwood.text.bytes import ByteTokenizer
from tests.conftest import logits_after
from tests.tools.model_cache import home, toy  # noqa: F401 - fixtures


@pytest.mark.parametrize("model", [None, 123, b"tiny", ["tiny"]])
def test_invalid_model_names_are_refused(model: object) -> None:
    with pytest.raises(ModelError, match="by its name or its path"):
        LLM(model)


def test_path_is_a_local_path(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_target(ModelOptions(model=toy)).target.info.name.startswith("toy-")
    resolve(str(toy)).path.rename(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    assert load_target(ModelOptions(model=Path("tiny"))).codec.vocab_size != ByteTokenizer.vocab_size
    assert isinstance(load_target(ModelOptions(model="tiny")).codec, ByteTokenizer)


@pytest.mark.parametrize("device", ["xpu", "mps", "meta", None, 5, "", "gpu", "cuda:-1"])
def test_unsupported_devices_are_refused(device: object) -> None:
    with pytest.raises(OptionError, match=r"CPU or a CUDA device[\s\S]*allowed: auto, cpu, cuda"):
        LLM("tiny", device=device)


def test_missing_device_is_refused() -> None:
    with pytest.raises(CapabilityError, match=r"no such device|no CUDA device"):
        LLM("tiny", device="cuda:99")
    assert pick_device("cpu") == torch.device("cpu")


def test_exact_passes_need_a_fused_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CpuDecoder.why_unavailable():
        assert load_target(ModelOptions(model="tiny", device="cpu", exact=True)).target.info.is_exact
    monkeypatch.setattr(CpuDecoder, "why_declined", lambda *_: "there is no compiler")
    assert not load_target(ModelOptions(model="tiny", device="cpu")).target.info.is_exact
    with pytest.raises(CapabilityError, match="not exact"):
        load_target(ModelOptions(model="tiny", device="cpu", exact=True))


@pytest.mark.parametrize("target", ["hf", "hf-plain"])
def test_built_in_model_needs_native_target(target: str) -> None:
    with pytest.raises(OptionError, match="native target only"):
        LLM("tiny", target=target)


@pytest.mark.parametrize("cache_tokens", [10**15, 2**62, 2**80])
def test_too_large_cache_is_refused(toy: Path, cache_tokens: int) -> None:
    for model in ("tiny", toy):
        with pytest.raises(CapabilityError, match=r"no room for the cache[\s\S]*\d bytes\n[\s\S]*Lower cache_tokens"):
            load_target(ModelOptions(model=model, device="cpu", cache_tokens=cache_tokens))
    check_room(1000, 1000, torch.device("cpu"))


def test_running_out_of_memory_while_loading(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("draftwood.targets.native.target.load_weights", full)
    with pytest.raises(CapabilityError, match="do not fit into the memory"):
        load_target(ModelOptions(model=toy, device="cpu", dtype="bfloat16"))
    assert "cache alone" not in str(out_of_memory(torch.device("cuda"), None))


def test_a_full_context_leaves_room_for_a_tree(toy: Path) -> None:
    assert default_cache_tokens(8, 1024) == 8 * (1024 + LARGEST_TREE)
    assert default_cache_tokens(8, 131_072) == MAX_CACHE_TOKENS
    for model in ("tiny", toy):
        target = load_target(ModelOptions(model=model, max_batch=3)).target
        assert target.num_slots == 3 * (target.info.context_length + LARGEST_TREE)
        assert load_target(ModelOptions(model=model, cache_tokens=100)).target.num_slots == 100


@pytest.mark.parametrize("target", ["auto", "native", "hf"])
@pytest.mark.parametrize(
    "change", [{"hidden_size": None}, {"num_attention_heads": 0}, {"eos_token_id": "a"}, {"rope_parameters": "x"}]
)
def test_invalid_configurations_never_give_a_traceback(toy: Path, target: str, change: dict[str, object]) -> None:
    if target == "hf":
        pytest.importorskip("transformers")
    folder = resolve(os.fspath(toy)).path
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(DraftwoodError):
        load_target(ModelOptions(model=folder, target=target))


@pytest.mark.parametrize("messages", ["hello", [], [5], [{"role": "user"}], [{"role": "", "content": "x"}]])
def test_byte_tokenizer_checks_messages_like_the_real_one(messages: object) -> None:
    with pytest.raises(PromptError, match=r"[Mm]essage"):
        ByteTokenizer().apply_chat(messages)


def test_compiling_the_kernel_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes several seconds on first use from a checkout, and is silent otherwise."""
    told: list[str] = []
    for needed in (True, False):
        monkeypatch.setattr(CpuDecoder, "needs_build", lambda needed=needed: needed)
        load_target(ModelOptions(model="tiny", device="cpu"), lambda label, *_: told.append(label))
    assert told == [COMPILING, COMPILING]  # start and end, once


@pytest.mark.skipif(not CpuDecoder.is_available(), reason="no kernel")
def test_a_cpu_does_without_triton() -> None:
    """Importing it would take as much memory as a small model."""
    code = (
        "import sys; from draftwood.config import ModelOptions; from draftwood.targets.load import load_target; "
        "load_target(ModelOptions(model='tiny', device='cpu')); print('triton' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


class TestStored:
    def test_gguf_file_runs_as_stored(self, toy: Path) -> None:
        labels: list[str] = []
        target = load_target(
            ModelOptions(model=toy, device="cpu"), lambda label, done, total: labels.append(label)
        ).target
        folder = resolve(str(toy)).path
        assert (target.info.quantize, target.info.backend) == ("Q8_0", "fused-cpu")
        assert target.info.name.endswith(" (Q8_0)")
        assert labels.count("loading weights") == target.info.num_layers
        assert not (folder / "model.safetensors").exists()
        assert target.info.num_parameters == describe(folder).num_parameters
        ids = list(range(40))
        stored = logits_after(target, ids)
        dense = load_target(ModelOptions(model=toy, device="cpu", dtype="float32")).target
        assert (dense.info.quantize, dense.info.dtype) == (None, torch.float32)
        assert (folder / "model.safetensors").exists()
        exact = logits_after(dense, ids)
        assert (stored - exact).norm() / exact.norm() < 0.1
        for ours, theirs in zip(target.parts()[:3], dense.parts()[:3], strict=True):
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.01, atol=0.01)

    def test_file_that_changes_while_it_is_loaded_is_refused(self, toy: Path) -> None:
        def touch(label: str, done: int, total: int) -> None:
            if label == "loading weights":
                os.utime(toy, (done, done))

        with pytest.raises(ModelError, match="changed while it was read"):
            load_target(ModelOptions(model=toy, device="cpu"), touch)

    def test_files_without_a_kernel_are_expanded(self, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(FORMATS, "Q8_0")
        target = load_target(ModelOptions(model=toy, device="cpu")).target
        assert (target.info.quantize, target.info.dtype) == (None, torch.bfloat16)

    @pytest.mark.parametrize("quantize", ["q8_0", "q4_0", "q4_k"])
    def test_folders_are_quantized_on_the_way_in(self, toy: Path, quantize: str) -> None:
        exact = load_target(ModelOptions(model=toy, device="cpu", dtype="float32")).target
        folder = resolve(str(toy)).path
        (folder / "model.gguf").unlink()  # an ordinary folder
        target = load_target(ModelOptions(model=folder, device="cpu", quantize=quantize)).target
        assert (target.info.quantize, target.info.name) == (quantize, f"{folder.name} ({quantize})")
        logits, wanted = (logits_after(each, list(range(40))) for each in (target, exact))
        assert (logits - wanted).norm() / wanted.norm() < (0.1 if quantize == "q8_0" else 0.7)

    def test_block_formats_need_a_cpu(self, toy: Path) -> None:
        with pytest.raises(
            CapabilityError, match=r"q4_0 need the fused CPU decoder(.*\n)*.*transformers runs this model"
        ):
            load_target(ModelOptions(model=toy, device="cpu", target="hf", quantize="q4_0"))
        with pytest.raises(CapabilityError, match=r"float16(.*\n)*.*Leave quantize out"):
            load_target(ModelOptions(model="tiny", device="cpu", dtype="float16", quantize="q4_0"))


@pytest.mark.parametrize("quantize", ["q8_0", "q4_0", "q4_k"])
def test_tiny_model_in_blocks(quantize: str) -> None:
    target = load_target(ModelOptions(model="tiny", device="cpu", quantize=quantize)).target
    exact = load_target(ModelOptions(model="tiny", device="cpu")).target
    logits, wanted = (logits_after(each, list(range(40))) for each in (target, exact))
    assert 0 < (logits - wanted).norm() / wanted.norm() < 0.3
    assert target.parts().embed.shape == exact.parts().embed.shape
