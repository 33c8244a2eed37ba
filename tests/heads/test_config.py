"""Configurations of heads, their vocabularies, and compatible targets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import DraftwoodError, ModelError, OptionError
from draftwood.heads import KINDS, Eagle3Head, build_head, check_fit, default_head_config
from draftwood.heads.config import default_taps
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from tests.tools.head import SMALL, random_head, random_parts

# -- vocabularies ----------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 39), min_size=1, max_size=39), st.randoms(use_true_random=False))
def test_ids_round_trip(tokens: set[int], rng: Any) -> None:
    chosen = sorted(tokens)
    rng.shuffle(chosen)
    head = build_head(default_head_config("eagle3", SMALL, draft_vocab_size=len(chosen)))
    assert isinstance(head, Eagle3Head)
    head.set_vocabulary(torch.tensor(chosen))
    own = torch.arange(len(chosen))
    assert head.target_ids(own).tolist() == chosen
    assert torch.equal(head.draft_ids(head.target_ids(own)), own)
    others = torch.tensor(sorted(set(range(40)) - tokens), dtype=torch.int64)
    assert (head.draft_ids(others) == -1).all()
    assert head.t2d.nonzero().flatten().tolist() == sorted(tokens)
    assert head.d2t.tolist() == [token - i for i, token in enumerate(chosen)]


def test_loaded_state_contains_vocabulary() -> None:
    head = random_head("eagle3", SMALL, 3, draft_vocab_size=9)
    other = build_head(head.config)
    other.load_state_dict(head.state_dict())
    every = torch.arange(SMALL.vocab_size)
    assert torch.equal(other.draft_ids(every), head.draft_ids(every))
    assert not torch.equal(other.draft_ids(every), build_head(head.config).draft_ids(every))


@pytest.mark.parametrize("tokens", [[1, 2], [1, 2, 2], [1, 2, 40], [-1, 2, 3], [1, 2, 3, 4]], ids=str)
def test_invalid_vocabularies_are_refused(tokens: list[int]) -> None:
    head = build_head(default_head_config("eagle3", SMALL, draft_vocab_size=3))
    assert isinstance(head, Eagle3Head)
    with pytest.raises(ModelError, match="not a draft vocabulary"):
        head.set_vocabulary(torch.tensor(tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_match_target_without_draft_vocabulary(kind: str) -> None:
    head = random_head(kind, SMALL)
    ids = torch.arange(SMALL.vocab_size)
    assert torch.equal(head.target_ids(ids), ids)
    assert torch.equal(head.draft_ids(ids), ids)
    assert not {"d2t", "t2d"} & set(head.state_dict())


# -- targets and configurations --------------------------------------------------------------------------------------


def test_a_head_without_a_target_raises() -> None:
    with pytest.raises(DraftwoodError, match="no target yet"):
        random_head("eagle", SMALL).embed(torch.tensor([1]))


def test_parts_of_another_target_are_refused() -> None:
    parts = random_parts(replace(SMALL, vocab_size=41, hidden_size=20))
    with pytest.raises(ModelError, match=r"embed \[41, 20\], not \[40, 24\]") as caught:
        random_head("eagle3", SMALL).bind(parts)
    assert "norm [20]" in str(caught.value)
    assert "head [41, 20]" in str(caught.value)


@given(st.integers(1, 120))
def test_default_taps_are_valid_and_ascending(num_layers: int) -> None:
    taps = default_taps(num_layers)
    assert len(taps) == 3
    assert list(taps) == sorted(taps)
    assert all(0 <= tap <= num_layers for tap in taps)
    assert len(set(taps)) == min(3, num_layers + 1)
    if num_layers >= 7:
        assert taps == (2, num_layers // 2, num_layers - 3)


def test_default_taps_are_accepted_by_target() -> None:
    target = tiny_target()
    for kind in KINDS:
        config = default_head_config(kind, TINY_CONFIG)
        target.set_taps(config.taps)
        assert config.taps_for(TINY_CONFIG.num_layers) == config.taps
        assert replace(config, taps=()).taps_for(TINY_CONFIG.num_layers) == config.taps
        assert check_fit(config, target.info) == []
        build_head(config)
    assert default_head_config("eagle", TINY_CONFIG).taps == (TINY_CONFIG.num_layers,)


def test_check_fit_lists_every_problem() -> None:
    config = default_head_config("eagle3", SMALL)
    assert check_fit(config, SMALL) == []
    found = check_fit(config, TINY_CONFIG)
    assert [line.split(":")[0] for line in found] == ["hidden size", "vocabulary", "taps", "layers"]
    assert "[4, 6]" in found[2]
    assert check_fit(replace(config, target_num_layers=0), replace(SMALL, num_layers=8)) == []
    last = replace(default_head_config("eagle", SMALL), target_num_layers=0)
    assert check_fit(last, replace(SMALL, num_layers=10)) == ["taps: the head reads [9], the target's last state is 10"]


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("eagle3", {"draft_vocab_size": 41}, "draft_vocab_size is 41"),
        ("eagle3", {"hidden_size": 16}, "own_embed is False"),
        ("eagle3", {"num_layers": 0}, "num_layers is 0"),
        ("eagle3", {"taps": (1, 2)}, r"taps is \(1, 2\) and must be 3 layers"),
        ("eagle3", {"taps": (1, 2, -3)}, "taps"),
        ("eagle3", {"own_lm_head": False, "draft_vocab_size": 9}, "own_lm_head is False"),
        ("eagle3", {"num_kv_heads": 3}, "a divisor of num_heads, 4"),
        ("eagle3", {"head_dim": 5}, "an even number"),
        ("eagle", {"hidden_size": 16}, "that of the target, 24"),
        ("eagle", {"draft_vocab_size": 16}, "draft_vocab_size is 16"),
        ("eagle", {"feature": "both"}, "feature is unknown"),
        ("medusa", {"num_heads_ahead": 0}, "num_heads_ahead is 0"),
        ("medusa", {"num_layers": 1}, "num_layers is 1"),
        ("hydra", {"num_residual": 0}, "num_residual is 0"),
        ("hass", {}, "kind is unknown"),
    ],
)
def test_invalid_configurations_are_refused(kind: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        default_head_config(kind, SMALL, **changes)
