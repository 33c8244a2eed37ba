"""`grow_head`: a trained head of another shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftwood.errors import OptionError
from draftwood.heads import grow_head
from tests.tools.head import SMALL, causal, random_head, random_parts

PARTS = random_parts(SMALL)


def outputs(head: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    taps = torch.randn(2, 6, head.config.num_taps * SMALL.hidden_size, generator=generator)
    token_ids = torch.randint(SMALL.vocab_size, (2, 6), generator=generator)
    with torch.no_grad():
        return head(head.embed(token_ids), head.fuse(taps), torch.arange(6).expand(2, 6), causal)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_larger_inner_size_changes_nothing_at_first(kind: str) -> None:
    head = random_head(kind, SMALL)
    head.bind(PARTS)
    grown = grow_head(head, {"intermediate_size": 2 * head.config.intermediate_size}, PARTS, seed=0)
    assert grown.num_parameters() > head.num_parameters()
    assert torch.allclose(outputs(grown), outputs(head), atol=1e-5)
    new_units = grown.layers[0].mlp.up_proj.weight[head.config.intermediate_size :]
    assert new_units.abs().min() > 0  # they can learn


def test_a_head_without_its_own_lm_head_has_all_tokens() -> None:
    head = random_head("eagle3", SMALL, draft_vocab_size=SMALL.vocab_size // 2)
    head.bind(PARTS)
    grown = grow_head(head, {"own_lm_head": False}, PARTS, seed=0)
    assert grown.lm_head is None
    assert not grown.config.has_draft_vocabulary
    hidden = outputs(grown)
    assert torch.allclose(hidden, outputs(head), atol=1e-5)
    assert grown.logits(hidden).shape[-1] == SMALL.vocab_size


def test_a_head_does_not_shrink() -> None:
    head = random_head("eagle", SMALL)
    for changes in ({"intermediate_size": head.config.intermediate_size - 2}, {"own_lm_head": True}):
        with pytest.raises(OptionError, match=r"head\.changes"):
            grow_head(head, changes, PARTS, seed=0)
