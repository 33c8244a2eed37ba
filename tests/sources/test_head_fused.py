"""EAGLE-3 heads in the fused CPU decoder against the module in float32."""

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftwood import SamplingParams
from draftwood.heads import Eagle3Head
from draftwood.models.config import ModelConfig, Rope
from draftwood.sources.neural.base import DraftSegment
from draftwood.sources.neural.build import make_head_model
from draftwood.sources.neural.head import EagleModel
from draftwood.sources.neural.head_fused import FusedEagleModel
from draftwood.targets.base import Segment, chain_parents
from draftwood.targets.native.cpu import CpuDecoder, features
from tests.conftest import threads
from tests.tools.head import SMALL, random_head, random_parts
from tests.tools.neural import neural_llm, random_target, same_as_plain

pytestmark = pytest.mark.skipif(not CpuDecoder.is_available(), reason=f"no kernel: {CpuDecoder.why_unavailable()}")

MODEL = replace(SMALL, vocab_size=90, hidden_size=64, intermediate_size=96, head_dim=16)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"draft_vocab_size": 50},
    "shared lm_head": {"own_lm_head": False},
    "norms": {"norm_before_fc": True, "fc_norm": True, "norm_before_residual": True, "norm_output": True},
    "more": {"num_layers": 2, "own_embed": True, "qkv_bias": True, "o_bias": True, "qk_norm": True, "norm_eps": 1e-2,
             "rope": Rope(kind="llama3", theta=5e5, factor=8.0, original_context=128)},
    "odd sizes": {"intermediate_size": 37, "head_dim": 10},
}  # fmt: skip
TEXT = [5, 70, 31, 2, 89, 64, 8]
TREE = [-1, -1, 0, 0, 2, 1, 4]  # -1: below the last token of the text


def pair_of_models(variant: str, dtype: torch.dtype = torch.float32) -> tuple[EagleModel, EagleModel]:
    head = random_head("eagle3", MODEL, **VARIANTS[variant])
    assert isinstance(head, Eagle3Head)
    head.bind(random_parts(MODEL, dtype=dtype))
    exact, ours = (make_head_model(copy.deepcopy(head), MODEL.num_layers, 64, quantize=flag) for flag in (False, True))
    assert isinstance(exact, EagleModel)
    assert isinstance(ours, FusedEagleModel)
    return exact, ours


def taps(size: int) -> torch.Tensor:
    return torch.randn(size, 3 * MODEL.hidden_size, generator=torch.Generator().manual_seed(3))


def run(model: EagleModel, chunk: int = 100, *, one_by_one: bool = False) -> torch.Tensor:
    """Logits after the text and after the nodes of a tree, [1 + nodes, V]."""
    kept: list[torch.Tensor] = []
    compute = model._logits

    def noted(*arguments: Any) -> torch.Tensor:
        kept.append(compute(*arguments).clone())
        return kept[-1]

    sequence = model.open(40)
    assert sequence is not None
    model._logits = noted  # type: ignore[method-assign]
    features = taps(len(TEXT))
    for start in range(0, len(TEXT), chunk):
        part = TEXT[start : start + chunk]
        segment = Segment(sequence, part, chain_parents(len(part)), int(start + chunk >= len(TEXT)))
        model.forward([DraftSegment(segment, features[start : start + chunk])], 3)
        model.keep(sequence, range(len(part)))
    ids = random.Random(1).choices(range(MODEL.vocab_size), k=len(TREE))
    # All nodes of a level must be known before the next.
    for first, end in [(i, i + 1) for i in range(len(TREE))] if one_by_one else [(0, 2), (2, 4), (4, 6), (6, 7)]:
        segment = Segment(sequence, ids[first:end], TREE[first:end], end - first, first)
        model.forward([DraftSegment(segment)], 3)
    model.close(sequence)
    return torch.cat(kept)


@pytest.mark.parametrize(("weights", "error"), [("q8_0", 0.06), (features.FORMAT, 0.4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_agrees_with_the_module(
    variant: str, dtype: torch.dtype, weights: str, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the rounding of weights, and of inputs to 8 bits."""
    monkeypatch.setattr(features, "FORMAT", weights)
    exact, ours = (run(model) for model in pair_of_models(variant, dtype))
    assert exact.shape == ours.shape == (1 + len(TREE), exact.shape[1])
    assert (ours - exact).norm() / exact.norm() < error


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_node_does_not_depend_on_its_pass(variant: str) -> None:
    _, model = pair_of_models(variant)
    with threads(2):
        together = run(model)
    assert torch.equal(together, run(model, one_by_one=True))


def test_output_is_that_of_plain_decoding() -> None:
    llm = neural_llm("eagle3", random_target(), quantize=True)
    assert isinstance(llm._default._shared.model, FusedEagleModel)
    same_as_plain(llm, [[1, 2, 3], list(range(40))], SamplingParams(max_tokens=20))


def short_model(
    monkeypatch: pytest.MonkeyPatch, seen: int, model: ModelConfig = MODEL
) -> tuple[FusedEagleModel, FusedEagleModel]:
    """A head with its whole vocabulary, of 90 tokens or more, and one that drafts the first 64 and ``seen`` others."""
    monkeypatch.setattr(features, "FREQUENT", 64)
    monkeypatch.setattr(features, "SEEN", seen)
    head = random_head("eagle3", model, own_lm_head=False)
    head.bind(random_parts(model))
    found = [
        make_head_model(copy.deepcopy(head), model.num_layers, 64, quantize=True, has_shortlist=flag)
        for flag in (False, True)
    ]
    whole, short = found
    assert isinstance(whole, FusedEagleModel)
    assert isinstance(short, FusedEagleModel)
    return whole, short


def read_text(model: FusedEagleModel, text: list[int]) -> dict[int, float]:
    """Logits of the best tokens after a text."""
    sequence = model.open(40)
    assert sequence is not None
    segment = Segment(sequence, text, chain_parents(len(text)), 1)
    top = model.forward([DraftSegment(segment, taps(len(text)))], 64)
    model.close(sequence)
    return dict(zip(top.ids[0].tolist(), top.logits[0].tolist(), strict=True))


def test_a_shortlist_has_the_first_tokens_and_those_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, short = short_model(monkeypatch, seen=4)
    everything, some = read_text(whole, TEXT), read_text(short, TEXT)
    others = [token for token in TEXT if token >= 64]
    assert len(others) == 3
    common = {token for token in everything if token < 64 or token in others}
    assert common <= set(some)
    assert [some[token] for token in common] == [everything[token] for token in common]
    assert set(some) <= {*range(64), *others}


def test_a_long_shortlist_is_packed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, short = short_model(monkeypatch, 150, replace(MODEL, vocab_size=400))
    for start in (100, 190, 280, 281):  # the last ones take the places of the first
        short._decoder.note_text(range(start, start + 90))
    assert short._decoder.shortlist is not None
    listed = set(short._decoder.shortlist.ids.tolist())
    assert listed == {*range(64), *range(221, 371)}
    everything, some = read_text(whole, TEXT[:1]), read_text(short, TEXT[:1])
    common = {token for token in everything if token in listed}
    assert len(common) > 20
    assert {token: some[token] for token in common} == {token: everything[token] for token in common}


def test_the_oldest_tokens_leave_a_shortlist(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = short_model(monkeypatch, seen=4)
    shortlist = model._decoder.shortlist
    assert shortlist is not None
    read_text(model, [70, 71, 5])
    assert sorted(shortlist.ids[64 : shortlist.size].tolist()) == [70, 71]
    read_text(model, [72, 70, 73, 74])
    assert sorted(shortlist.ids[64 : shortlist.size].tolist()) == [71, 72, 73, 74]
    read_text(model, list(range(80, 90)))
    assert sorted(shortlist.ids[64 : shortlist.size].tolist()) == [86, 87, 88, 89]
    assert not shortlist.add([89, 3])
