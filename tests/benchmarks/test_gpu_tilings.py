"""``benchmarks/gpu_tilings.py`` without a GPU: its tilings can be compiled, and its passes are correct."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from tests.tools.script import load_script
from tests.tools.triton import DEVICE, INTERPRETED, run_interpreted, runs_kernels

pytest.importorskip("triton")

from draftwood.targets.native.cuda.attention.plan import AttentionConfig
from draftwood.targets.native.cuda.products import launch as products
from draftwood.targets.native.cuda.products.launch import Gpu, Kind, Tiling

GPUS = {"H200": Gpu(132, 227 * 1024), "a smaller one": Gpu(46, 99 * 1024)}
ATTENTION = AttentionConfig(
    group=2, block_m=16, block_s=32, block_n=16, splits=2, min_blocks=1, num_warps=4, num_stages=2, merge="kernel"
)
interpreter_aside = pytest.mark.skipif(INTERPRETED, reason="has no kernels")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("gpu_tilings")


@interpreter_aside
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@interpreter_aside
@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("rows", [1, 24, 64])
@pytest.mark.parametrize("shape", ["135M", "1.5B", "8B"])
def test_tilings_divide_evenly_and_fit_shared_memory(script: ModuleType, shape: str, rows: int, gpu: Gpu) -> None:
    padded = script.padded(rows)
    assert padded in (16, 32, 64)
    for name, dims in script.layer_products(script.SHAPES[shape]).items():
        found = script.candidates(dims, padded, gpu)
        assert found, name
        assert len(set(found)) == len(found)
        matrices = 2 if dims.kind is Kind.GATED else 1
        for block_out, block_in, splits, warps, stages, *_ in found:
            assert dims.num_in % (block_in * splits) == 0
            assert block_out <= 32 or dims.num_out % block_out == 0
            assert 2 <= stages <= 1 + dims.num_in // (block_in * splits)
            assert stages * 2 * (block_in * block_out * matrices + block_in * padded) <= gpu.shared_bytes
            assert warps in (4, 8)


@interpreter_aside
def test_every_tiling_except_the_default_is_tried_once(script: ModuleType) -> None:
    gpu = GPUS["H200"]
    parts = ("qkv", "o", "gate_up", "down", "attention")
    found = script.trials("1.5B", 64, gpu, parts)
    assert len(set(found)) == len(found) > 100
    assert found == script.trials("1.5B", 64, gpu, parts)  # workers divide them by index
    assert {name for name, _ in found[:5]} == set(parts)
    assert {name for name, _ in script.trials("1.5B", 64, gpu, ("o",))} == {"o"}
    dims = script.layer_products(script.SHAPES["1.5B"])["qkv"]
    usual = products.choose_tiling(dims.num_in, dims.num_out, 64, gpu, dims.kind)
    assert usual in script.candidates(dims, 64, gpu)
    assert ("qkv", usual) not in found


@interpreter_aside
def test_tiling_override_is_limited_to_product_and_context(script: ModuleType) -> None:
    gpu, usual = GPUS["H200"], products.choose_tiling
    mine = Tiling(32, 64, 2, 4, 3)
    with script.cut({"o": mine}, script.SHAPES["1.5B"]):
        assert products.Product(1536, 1536, 64, gpu, Kind.PLAIN, dtype=torch.bfloat16).tiling == mine
        assert products.choose_tiling(1536, 8960, 64, gpu, Kind.GATED, exact=False) == usual(
            1536, 8960, 64, gpu, Kind.GATED
        )
    assert products.choose_tiling is usual


@interpreter_aside
def test_best_tilings_of_each_product_come_first(script: ModuleType) -> None:
    now = {"o": Tiling(64, 64, 1, 4, 4), "down": Tiling(64, 128, 2, 4, 4)}
    ratios = {"o": (1.02, 0.97, 1.5), "down": (0.99,)}
    found = [script.Found(name, now[name], 2.0, 2.0 * ratio) for name, each in ratios.items() for ratio in each]
    rows = [line.strip("|\n ").split(" | ") for line in script.lines(found, now, top=2)]
    assert [row[-1] for row in rows] == [
        "ratio", *["---"], "as it is", "0.9700", "1.0200", "ratio", "---", "as it is", "0.9900",
    ]  # fmt: skip
    assert rows[0][0] == "o: block_out, block_in, splits, num_warps, num_stages, block_rows, is_serial"
    assert rows[3][:3] == ["64, 64, 1, 4, 4, 0, False", "1.9400", "2.0000"]


@interpreter_aside
@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("shape", ["135M", "1.5B", "8B"])
def test_attention_tilings_fit(script: ModuleType, shape: str, gpu: Gpu) -> None:
    config = script.SHAPES[shape]
    for rows in (1, 24, 64):
        found = script.attention_candidates(config, rows, gpu)
        assert len(set(found)) == len(found) > 10
        for each in found:
            assert each.nodes_per_tile >= 1
            assert 2 * config.head_dim * (2 * each.num_stages * each.block_s + each.block_m) <= gpu.shared_bytes
    usual = script.as_it_is(config, 64, gpu)["attention"]
    assert usual.group == config.num_heads // config.num_kv_heads


@interpreter_aside
@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--shape", "70B"], ["no such shape", "1.5B"]),
        (["--rows", "65"], ["--rows", "1 to 64"]),
        (["--parts", "o,heads"], ["no such part", "heads", "attention"]),
        (["--workers", "0"], ["--workers"]),
        ([], ["There is no GPU here"]),
    ],
)
def test_unsupported_setups_are_refused(
    script: ModuleType,
    argv: list[str],
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert script.main(argv) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in told), err


@runs_kernels
def test_output_does_not_depend_on_tiling(script: ModuleType) -> None:
    config = replace(script.SHAPES["tiny"], vocab_size=130, num_layers=1)  # the interpreter is slow
    passes = script.Passes(config, 3, DEVICE, context=5)
    usual, other = (
        passes.launched(changes)
        for changes in ({}, {"o": Tiling(16, 16, 2, 4, 2), "gate_up": Tiling(64, 32, 2, 4, 2), "attention": ATTENTION})
    )
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    before, after = (torch.from_numpy(work.best().logits[:3]) for work in (usual, other))
    assert before.isfinite().all()
    torch.testing.assert_close(before, after, atol=0.02, rtol=0.05)
