"""Unrolled training passes against a drafter that runs token by token with a cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.heads import Eagle3Head, EagleHead
from draftwood.train.attention.unrolled import UnrolledAttention, unroll
from tests.tools.head import SMALL, causal, random_head, random_parts
from tests.tools.train import drafted

KINDS = ["eagle", "eagle3"]


def bound_random_head(kind: str, dtype: torch.dtype = torch.float32, **changes: int) -> EagleHead | Eagle3Head:
    head = random_head(kind, SMALL, dtype=dtype, **changes)
    head.bind(random_parts(SMALL, dtype=dtype))
    assert isinstance(head, (EagleHead, Eagle3Head))
    return head


def texts(num_texts: int, size: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(SMALL.vocab_size, (num_texts, size + 1), generator=generator)
    return token_ids, torch.randn(num_texts, size, SMALL.hidden_size, generator=generator).to(dtype)


def run(
    head: EagleHead | Eagle3Head, ids: torch.Tensor, features: torch.Tensor, steps: int, **options: bool
) -> list[torch.Tensor]:
    positions = torch.arange(features.shape[1]).expand(features.shape[:2])
    return unroll(head, head.embed(ids[:, 1:]), features, positions, steps, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_of_every_step_matches_a_drafter(kind: str, num_layers: int, dtype: torch.dtype) -> None:
    head = bound_random_head(kind, dtype, num_layers=num_layers)
    ids, features = texts(2, 7, dtype)
    outputs = run(head, ids, features, 4)
    assert [output.shape[1] for output in outputs] == [7, 6, 5, 4]
    for text in range(2):
        for root in range(7):
            steps = min(4, 7 - root)
            wanted = drafted(head, ids[text], features[text], root, steps)
            found = torch.stack([outputs[step][text, root] for step in range(steps)])
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@given(size=st.integers(1, 9), steps=st.integers(1, 5), seed=st.integers(0, 99))
def test_any_size(size: int, steps: int, seed: int) -> None:
    head = bound_random_head("eagle", torch.float64)
    ids, features = texts(1, size, torch.float64, seed)
    outputs = run(head, ids, features, steps)
    assert len(outputs) == min(steps, size)
    root = seed % size
    reached = min(steps, size - root)
    wanted = drafted(head, ids[0], features[0], root, reached)
    torch.testing.assert_close(
        torch.stack([outputs[step][0, root] for step in range(reached)]), wanted, rtol=1e-4, atol=1e-4
    )


def test_one_step_is_plain_causal_attention() -> None:
    query, (key, value) = torch.randn(2, 5, 4, 6), torch.randn(2, 2, 5, 2, 6)
    found = UnrolledAttention().attend(0)(0, query, key, value)
    torch.testing.assert_close(found, causal(0, query, key, value))


def test_row_attends_only_to_its_own_guesses() -> None:
    """Changing the input of one row of a deeper step changes only that row from there on."""
    attention, changed = UnrolledAttention(), UnrolledAttention()
    size = 6
    rows = [(torch.randn(1, size - step, 4, 6), *torch.randn(2, 1, size - step, 2, 6)) for step in range(3)]
    for step, (query, key, value) in enumerate(rows):
        found = attention.attend(step)(0, query, key, value)
        if step == 1:
            value = value.clone()
            value[0, 2] += 1.0
        other = changed.attend(step)(0, query, key, value)
        differs = (found != other).any(dim=-1).any(dim=-1)[0]
        assert differs.nonzero().flatten().tolist() == ([] if step == 0 else [2])


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_steps_do_not_change_gradients(kind: str) -> None:
    head = bound_random_head(kind)
    ids, features = texts(2, 6, torch.float32)
    gradients = []
    for checkpoints in (False, True):
        head.zero_grad()
        sum(output.square().sum() for output in run(head, ids, features, 3, checkpoints=checkpoints)).backward()
        gradients.append([p.grad.clone() for p in head.layers.parameters()])
    torch.testing.assert_close(*gradients)


def test_detached_steps_stop_gradients() -> None:
    head = bound_random_head("eagle")
    ids, features = texts(1, 5, torch.float32)
    values = []
    for detach in (True, False):
        first, second = run(head, ids, features, 2, detach=detach)
        (gradient,) = torch.autograd.grad(second.sum(), first, allow_unused=True)
        assert (gradient is None) is detach
        values.append(second)
    assert torch.equal(*values)
