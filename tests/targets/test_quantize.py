"""8-bit weights: rounding, quantized models, and supported targets."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from draftwood import LLM, SamplingParams
from draftwood.bench.records.machine import describe_model
from draftwood.bench.settings import BenchSettings
from draftwood.check import check
from draftwood.config import ModelOptions
from draftwood.drafters.memory import model_fingerprint
from draftwood.errors import CapabilityError, OptionError
from draftwood.models.tensors import tensor_shapes
from draftwood.sizing.costs import profile_path
from draftwood.sources.successors import successors_path
from draftwood.targets.base import Segment, chain_parents
from draftwood.targets.load import load_target
from draftwood.targets.native import cuda, quantize
from draftwood.targets.native.quantize import FORMATS, Quantized, format_of, quantize_matrix, row_blocks, to_dense
from draftwood.targets.native.weights import assemble, load_weights
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from draftwood.text.bytes import ByteTokenizer
from tests.tools.cli import Command, _plain_environment, draftwood_command  # noqa: F401 - fixtures
from tests.tools.model_cache import home, toy  # noqa: F401 - fixtures
from tests.tools.triton import DEVICE

NAMES = sorted(FORMATS)
MATRICES = ("qkv", "o", "gate_up", "down")


# -- rounding --------------------------------------------------------------------------------------------------------

weights = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, 1e-3, -7.0])
matrices = st.integers(1, 5).flatmap(
    lambda width: st.lists(st.lists(weights, min_size=width, max_size=width), min_size=1, max_size=4)
)


def codes(name: str) -> torch.Tensor:
    """All numbers of a format."""
    numbers = torch.arange(256).to(torch.uint8).view(FORMATS[name].dtype).double()
    return numbers[numbers.abs() <= FORMATS[name].largest]  # float8 has NaN too, int8 has -128


@pytest.mark.parametrize("name", NAMES)
@given(rows=matrices)
def test_weights_are_rounded_to_nearest(name: str, rows: list[list[float]]) -> None:
    weight = torch.tensor(rows)
    values, scales = quantize_matrix(weight, name)
    assert values.dtype == FORMATS[name].dtype
    assert scales.dtype == torch.float32
    exact = weight.double() / scales.double()[:, None]
    nearest = (exact[..., None] - codes(name)).abs().amin(dim=-1)
    assert bool(((values.double() - exact).abs() <= nearest + 1e-5 * exact.abs()).all())


@pytest.mark.parametrize("name", NAMES)
@given(rows=matrices)
def test_largest_weight_of_a_row_uses_full_range(name: str, rows: list[list[float]]) -> None:
    weight = torch.tensor(rows)
    values, scales = quantize_matrix(weight, name)
    zeros = (weight == 0).all(dim=1)
    peaks = values.float().abs().amax(dim=1)
    assert bool((scales[zeros] == 1.0).all())
    assert bool((peaks[zeros] == 0.0).all())
    normal = weight.abs().amax(dim=1) > 1e-30  # where quotients keep full precision
    assert bool((peaks[normal] == FORMATS[name].largest).all())


@pytest.mark.parametrize("name", NAMES)
def test_smallest_weights_stay_finite(name: str) -> None:
    weight = torch.tensor([[1e-45, 0.0], [1e-40, -3e-41], [3e38, 1.0]])
    values, scales = quantize_matrix(weight, name)
    assert bool(to_dense(Quantized(values, scales), torch.float32).isfinite().all())
    assert bool((scales > 0).all())


@pytest.mark.parametrize("name", NAMES)
@given(rows=matrices, power=st.integers(-8, 8))
def test_rows_are_quantized_independently_and_scale_exactly(name: str, rows: list[list[float]], power: int) -> None:
    weight = torch.tensor(rows) + 0.25  # no weight so small that its bits would be lost
    whole = quantize_matrix(weight, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "ROWS_AT_ONCE", 1)
        apart = quantize_matrix(weight, name)
    assert torch.equal(whole.scales, apart.scales)
    assert torch.equal(whole.values.float(), apart.values.float())
    scaled = quantize_matrix(weight * 2.0**power, name)
    assert torch.equal(scaled.values.float(), whole.values.float())


@pytest.mark.parametrize("name", NAMES)
def test_row_blocks_equal_the_matrix(name: str) -> None:
    matrix = quantize_matrix(torch.randn(7, 5), name)
    blocks = row_blocks(matrix, 3)
    assert [format_of(block) for block in blocks] == [name] * 3
    assert torch.equal(torch.cat([to_dense(block, torch.float32) for block in blocks]), to_dense(matrix, torch.float32))
    tensor = torch.randn(7, 5)
    assert row_blocks(tensor, 3) == [tensor]
    assert format_of(tensor) is None
    assert to_dense(tensor, torch.bfloat16) is tensor


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_only_matrices_are_quantized(name: str, tied: bool) -> None:
    config = replace(TINY_CONFIG, tied_embeddings=tied, qkv_bias=True, o_bias=True, qk_norm=True)
    generator = torch.Generator().manual_seed(0)
    named = {tensor: torch.randn(shape, generator=generator) for tensor, shape in tensor_shapes(config).items()}
    plain, small = (assemble(config, named.__getitem__, quantize=one) for one in (None, name))
    assert small.num_parameters() == plain.num_parameters() == sum(tensor.numel() for tensor in named.values())
    assert small.embed is named["model.embed_tokens.weight"]
    assert small.norm is named["model.norm.weight"]
    for kept, layer in zip(plain.layers, small.layers, strict=True):
        for field in type(layer).__slots__:
            before, after = getattr(kept, field), getattr(layer, field)
            assert format_of(after) == (name if field in MATRICES else None)
            if field in MATRICES:
                before, after = (to_dense(matrix, torch.float32) for matrix in (quantize_matrix(before, name), after))
            assert torch.equal(before, after)
    assert format_of(small.head) == name
    assert torch.equal(to_dense(small.head, torch.float32), to_dense(quantize_matrix(plain.head, name), torch.float32))


def test_original_matrix_is_freed_after_quantization(tmp_path: Path) -> None:
    config = replace(TINY_CONFIG, num_layers=3)
    shapes = tensor_shapes(config)
    handed_out: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def get(tensor: str) -> torch.Tensor:
        made = torch.randn(shapes[tensor])
        if len(shapes[tensor]) == 2 and "embed" not in tensor:
            handed_out.append(weakref.ref(made))
        return made

    def count(*_: int) -> None:
        alive.append(sum(made() is not None for made in handed_out))

    assemble(config, get, count, "int8")
    assert alive == [0] * config.num_layers
    assert len(handed_out) > 7 * config.num_layers

    save_file({tensor: torch.randn(shape) for tensor, shape in shapes.items()}, tmp_path / "model.safetensors")
    read = load_weights(tmp_path, config, torch.bfloat16, torch.device("cpu"), quantize="fp8")
    assert format_of(read.head) == format_of(read.layers[-1].down) == "fp8"
    assert read.embed.dtype == torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_other_decoders_match_the_reference(name: str) -> None:
    """They expand the weights: not faster, but with the logits of the 8-bit model."""
    logits = []
    for backend in ("eager", "auto"):
        target = tiny_target(quantize=name, backend=backend, device="cpu")
        segment = Segment(target.open(20), list(range(12)), chain_parents(12), 12)
        logits.append(target.forward([segment]).logits.clone())
    plain = tiny_target(backend="eager")
    unlike = plain.forward([Segment(plain.open(20), list(range(12)), chain_parents(12), 12)]).logits
    assert torch.allclose(*logits, atol=1e-3)
    assert 0.02 < float((logits[0] - unlike).abs().max()) < 5.0


@pytest.mark.parametrize("name", NAMES)
def test_quantized_model_has_its_own_identity(name: str) -> None:
    plain, small = (tiny_target(quantize=one).info for one in (None, name))
    assert (plain.name, plain.quantize) == ("tiny", None)
    assert (small.name, small.quantize) == (f"tiny ({name})", name)
    assert small.num_parameters == plain.num_parameters
    for told in (profile_path, successors_path, model_fingerprint, lambda info: describe_model(info)["name"]):
        assert told(plain) != told(small)


@pytest.mark.parametrize("name", NAMES)
def test_drafting_does_not_change_output(name: str) -> None:
    target = tiny_target(dtype=torch.bfloat16, device=DEVICE, quantize=name)
    assert target.info.backend == "fused-cuda" or DEVICE.type == "cpu"
    with LLM.from_target(target, ByteTokenizer(), drafter="goose", budget=24) as llm:
        prompts = [llm.tokenizer.encode(text) for text in ("abcabcabc", "one, two, three, " * 9)]  # narrow, wide
        records = list(check(llm, prompts, SamplingParams(max_tokens=60)))
    assert [record.verdict for record in records if record.verdict == "error"] == []
    assert max(record.stats.acceptance_length for record in records) > 1.0


# -- errors and options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_cpu_is_refused_before_fetching(name: str) -> None:
    for model in ("tiny", "nobody/has-this-model"):
        with pytest.raises(CapabilityError, match="need the fused GPU decoder") as caught:
            LLM(model, quantize=name, device="cpu")
        for part in (f"quantize {name}: not a GPU", "allowed: native models in bfloat16", "Leave quantize out"):
            assert part in str(caught.value)


@pytest.mark.parametrize("name", ["fp4", "", "auto", 8])
def test_unknown_formats_are_refused(name: Any) -> None:
    with pytest.raises(OptionError, match=r"quantize is unknown[\s\S]*fp8, int8"):
        load_target(ModelOptions(model="tiny", quantize=name, device="cpu"))
    with pytest.raises(OptionError, match="quantize is unknown"):
        BenchSettings(quantize=name)


def test_other_targets_and_types_are_refused(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "why_not_on", lambda device, quantize=None: "")  # as on a GPU
    with pytest.raises(CapabilityError, match="transformers runs this model"):
        load_target(ModelOptions(model=toy, quantize="fp8", target="hf", device="cpu"))
    for model in ("tiny", toy):
        with pytest.raises(CapabilityError, match="only bfloat16 and float16"):
            load_target(ModelOptions(model=model, quantize="int8", dtype="float32", device="cpu"))
    assert (
        load_target(ModelOptions(model="tiny", quantize="int8", dtype="bfloat16", device="cpu")).target.info.quantize
        == "int8"
    )


def test_old_gpus_take_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(cuda, "_why_not_built", lambda: "")
    gpu = torch.device("cuda")
    why = cuda.why_unavailable(TINY_CONFIG, torch.bfloat16, gpu, "fp8")
    assert why == "the GPU's compute capability is below 8.9; int8 may work"
    assert cuda.why_unavailable(TINY_CONFIG, torch.bfloat16, gpu, "int8") == ""
    assert cuda.why_unavailable(TINY_CONFIG, torch.bfloat16, gpu) == ""


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "abc", "--max-tokens", "4"),
        ("check", "--prompts", "prompts.txt"),
        ("tune", "--no-successors"),
        ("tune", "--static-tree", "tree.json", "--drafter", "recycling", "--prompts", "prompts.txt"),
        ("bench", "--limit", "1", "--max-tokens", "4", "--tasks", "code", "--out", "run"),
        ("bench", "record", "--limit", "1", "--tasks", "code", "--out", "run"),
    ],
)
def test_commands_pass_quantize_option(
    command: tuple[str, ...], draftwood_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("abc\n", encoding="utf-8")
    result = draftwood_command(*command, "--model", "tiny", "--device", "cpu", "--quantize", "fp8")
    assert result.code != 0
    assert "quantize fp8: not a GPU" in result.err


def test_help_mentions_quantize(draftwood_command: Command) -> None:
    text = draftwood_command("generate", "--help").out
    assert "--quantize {fp8,int8,q8_0,q4_0,q4_k}" in " ".join(text.split())
    assert "--device cuda --quantize fp8" in " ".join(text.split())
    assert draftwood_command("generate", "abc", "--quantize", "fp4").code == 2
