"""Cross-entropies with custom gradients, against plain formulas with autograd."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftwood.train.losses.entropy import class_cross_entropy, cross_entropies, hard_cross_entropy, log_sum_exp
from draftwood.train.losses.evaluator import Evaluator, Positions
from draftwood.train.trees.labels import Labels, node_losses, read_labels

scales = pytest.mark.parametrize("scale", [1.0, 80.0])


def drawn(*shape: int, scale: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Logits; the first and the last of a row have extreme values."""
    logits = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits = scale * logits.clamp(-1, 1)
    logits[..., 0], logits[..., -1] = scale, -scale
    return logits.to(dtype).requires_grad_()


# -- the plain formulas ----------------------------------------------------------------------------------------------


def plain_entropies(logits: Tensor, labels: Tensor, known: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    total = logits.logsumexp(dim=-1)
    whole = torch.where(known, total - (labels * logits).sum(dim=-1), 0.0)
    probs, ids = labels.topk(min(top_k, labels.shape[-1]), dim=-1)
    found = logits.gather(-1, ids.expand(*logits.shape[:-1], -1))
    return whole, torch.where(known, -(probs * (found - total[..., None])).sum(dim=-1), 0.0)


def plain_hard(logits: Tensor, ids: Tensor) -> Tensor:
    found = logits.gather(-1, ids.clamp_min(0).expand(len(logits), -1)[..., None]).squeeze(-1)
    return torch.where(ids >= 0, logits.logsumexp(dim=-1) - found, 0.0)


def plain_classes(logits: Tensor, ids: Tensor, probs: Tensor, rest: Tensor) -> Tensor:
    total = logits.logsumexp(dim=-1)
    known = -(probs * (logits.gather(1, ids) - total[:, None])).sum(dim=-1)
    if ids.shape[1] == logits.shape[1]:
        return known
    others = logits.scatter(1, ids, float("-inf")).logsumexp(dim=-1)
    return known - rest * (others - total)


def gradient_of(losses: Tensor, logits: Tensor, seed: int = 1) -> Tensor:
    """The gradient of a sum with weights of either sign, some of them 0."""
    weights = torch.randn(losses.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights = weights.where(weights.abs() > 0.2, 0.0).to(losses.dtype)
    return torch.autograd.grad((weights * losses).sum(), logits, retain_graph=True)[0]


def check(found: Tensor, wanted: Tensor, logits: Tensor) -> None:
    """Losses and gradients are equal; in float32 as exact as the reference."""
    near = {"atol": 1e-12, "rtol": 1e-12} if logits.dtype == torch.float64 else {"atol": 3e-5, "rtol": 3e-6}
    torch.testing.assert_close(found, wanted, **near)
    torch.testing.assert_close(gradient_of(found, logits), gradient_of(wanted, logits), **near)


# -- whole distributions ---------------------------------------------------------------------------------------------


@scales
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("top_k", [0, 1, 4, 11, 99])
def test_whole_labels_against_the_plain_formula(top_k: int, steps: int, dtype: torch.dtype, scale: float) -> None:
    logits = drawn(steps, 5, 11, scale=scale, dtype=dtype)
    labels = drawn(5, 11, seed=2, dtype=dtype).detach().softmax(dim=-1)
    known = torch.tensor([True, False, True, True, False])
    found, wanted = (make(logits, labels, known, top_k) for make in (cross_entropies, plain_entropies))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        check(one, other, logits)
        assert not one[:, ~known].any()
    both, plain = found[0] + 0.3 * found[1], wanted[0] + 0.3 * wanted[1]
    check(both, plain, logits)
    assert not gradient_of(both, logits)[:, ~known].any()


@scales
@pytest.mark.parametrize("steps", [1, 3])
def test_hard_labels_against_the_plain_formula(steps: int, scale: float) -> None:
    logits, ids = drawn(steps, 4, 9, scale=scale), torch.tensor([0, 8, -1, 3])
    found = hard_cross_entropy(logits, ids)
    check(found, plain_hard(logits, ids), logits)
    assert not found[:, 2].any()


def test_unknown_labels_have_no_loss_and_gradient() -> None:
    logits, labels = drawn(2, 3, 7), drawn(3, 7, seed=1).detach().softmax(dim=-1)
    found = cross_entropies(logits, labels, torch.zeros(3, dtype=torch.bool), 2)
    (gradient,) = torch.autograd.grad(sum(each.sum() for each in found), logits)
    assert not any(each.any() for each in (*found, gradient))


# -- some tokens and all others --------------------------------------------------------------------------------------


def labelled(rows: int, vocab: int, kept: int, seed: int, dtype: torch.dtype) -> Labels:
    said = drawn(rows, vocab, scale=4.0, seed=seed, dtype=dtype).detach()
    labels, _ = read_labels(said, None, kept, 1)
    return labels._replace(rest=torch.where(torch.arange(rows) == 1, 0.0, labels.rest))


@scales
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kept", [1, 4, 10, 11])
def test_classes_against_the_plain_formula(kept: int, dtype: torch.dtype, scale: float) -> None:
    logits = drawn(6, 11, scale=scale, dtype=dtype)
    ids, probs, rest, _ = labelled(6, 11, kept, 3, dtype)
    check(class_cross_entropy(logits, ids, probs, rest), plain_classes(logits, ids, probs, rest), logits)


@settings(max_examples=40)
@given(st.integers(2, 9), st.data())
def test_any_classes_and_any_masses(vocab: int, data: st.DataObject) -> None:
    """Masses need not sum to one because stored masses are rounded."""
    kept, seed = data.draw(st.integers(1, vocab)), data.draw(st.integers(0, 999))
    scale = data.draw(st.sampled_from([0.0, 1.0, 30.0, 80.0]))
    logits = drawn(3, vocab, scale=scale, seed=seed)
    ids = drawn(3, vocab, seed=seed + 1).detach().topk(kept).indices
    masses = drawn(3, kept + 1, seed=seed + 2).detach().abs()
    given_masses = (masses[:, :-1], masses[:, -1])
    check(class_cross_entropy(logits, ids, *given_masses), plain_classes(logits, ids, *given_masses), logits)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_masses_give_float32_losses(autocast: bool) -> None:
    """As stored in trees."""
    logits, labels = drawn(3, 9, dtype=torch.float32), labelled(3, 9, 4, 1, torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = class_cross_entropy(logits, labels.ids, labels.probs.half(), labels.rest)
    assert found.dtype == torch.float32
    check(found, plain_classes(logits, labels.ids, labels.probs.half(), labels.rest), logits)


def test_given_logits_are_not_modified() -> None:
    logits, labels = drawn(3, 9, scale=80.0), labelled(3, 9, 4, 1, torch.float64)
    before, version = logits.detach().clone(), logits._version
    class_cross_entropy(logits, *labels[:3]).sum().backward()
    assert torch.equal(logits, before)
    assert logits._version == version


@scales
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_sum_exp_from_the_greatest(dtype: torch.dtype, scale: float) -> None:
    logits = drawn(5, 40, scale=scale, dtype=dtype).detach()
    torch.testing.assert_close(log_sum_exp(logits, logits.argmax(dim=-1)), logits.logsumexp(dim=-1))


@scales
@pytest.mark.parametrize("vocabulary", [None, torch.tensor([1, 3, 4, 7, 8, 12, 19])])
@pytest.mark.parametrize(("kept", "width"), [(1, 3), (4, 2), (7, 7), (20, 1)])
def test_labels_against_the_plain_formula(kept: int, width: int, vocabulary: Tensor | None, scale: float) -> None:
    logits = drawn(6, 20, scale=scale).detach()
    logits[0, 3] += 2 * scale  # a row whose best token is in the vocabulary
    labels, children = read_labels(logits, vocabulary, kept, width)
    tokens = torch.arange(20) if vocabulary is None else vocabulary
    own = logits[:, tokens]
    best = own.log_softmax(dim=-1).topk(min(max(kept, width), len(tokens)))
    assert torch.equal(labels.ids, best.indices[:, :kept])
    assert torch.equal(children.tokens, tokens[best.indices][:, :width])
    torch.testing.assert_close(labels.probs, best.values.exp()[:, :kept])
    torch.testing.assert_close(labels.rest, 1 - labels.probs.sum(dim=-1), atol=1e-12, rtol=0.0)
    torch.testing.assert_close(children.log_probs, logits.log_softmax(dim=-1).gather(1, children.tokens))
    assert torch.equal(labels.counts, own.amax(dim=-1) == logits.amax(dim=-1))
    assert labels.counts[0]
    assert labels.counts.all() == (vocabulary is None)


# -- autograd --------------------------------------------------------------------------------------------------------

LABELS = drawn(3, 6, seed=5).detach().softmax(dim=-1)
KNOWN = torch.tensor([True, False, True])
NODES = labelled(3, 6, 2, 4, torch.float64)
LOSSES: dict[str, Callable[[Tensor], Any]] = {
    "whole": lambda logits: cross_entropies(logits[None], LABELS, KNOWN, 2),
    "hard": lambda logits: hard_cross_entropy(logits[None], torch.tensor([1, -1, 5])),
    "classes": lambda logits: class_cross_entropy(logits, NODES.ids, NODES.probs, NODES.rest),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


@every_loss
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_gradients_match_finite_differences(name: str, scale: float) -> None:
    assert torch.autograd.gradcheck(LOSSES[name], (drawn(3, 6, scale=scale),))


def summed(name: str, logits: Tensor) -> Tensor:
    found = LOSSES[name](logits)
    return found.sum() if isinstance(found, Tensor) else torch.stack(found).sum()


@every_loss
def test_second_backward_gives_same_gradients(name: str) -> None:
    logits = drawn(3, 6)
    loss = summed(name, logits)
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_second_derivatives_are_right_or_refused() -> None:
    for name in ("whole", "hard"):
        assert torch.autograd.gradgradcheck(LOSSES[name], (drawn(3, 6),))
    logits = drawn(3, 6)
    (slope,) = torch.autograd.grad(summed("classes", logits), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.square().sum().backward()


@every_loss
def test_without_gradients_the_values_are_the_same(name: str) -> None:
    logits = drawn(3, 6)
    with torch.no_grad():
        quiet = summed(name, logits)
    assert not quiet.requires_grad
    assert torch.equal(quiet, summed(name, logits).detach())


@every_loss
def test_autocast_rounds_nothing(name: str) -> None:
    """Logits stay in float32."""
    logits = drawn(3, 6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = summed(name, logits)
    outside = summed(name, logits)
    assert torch.equal(inside, outside)
    assert torch.equal(*(torch.autograd.grad(loss, logits)[0] for loss in (inside, outside)))


# -- recomputed blocks -----------------------------------------------------------------------------------------------


class TinyHead:
    """A head with a single matrix."""

    config = SimpleNamespace(draft_vocab_size=30, vocab_size=30, has_draft_vocabulary=False)

    def __init__(self) -> None:
        self.weight = drawn(30, 8, seed=7, dtype=torch.float32)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self.weight).float()

    def target_ids(self, ids: Tensor) -> Tensor:
        return ids

    draft_ids = target_ids


class Kernels(TorchDispatchMode):
    """Records the kernels that read or write as many elements as there are logits."""

    def __init__(self, num_logits: int) -> None:
        super().__init__()
        self._num_logits = num_logits
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        wide = [each for each in (*args, found) if isinstance(each, Tensor) and each.numel() >= self._num_logits]
        if wide and not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return found


PASSIVE = {"detach", "alias", "mm", "_unsafe_view", "scatter_", "scatter_add", "scatter_add_", "gather"}


def passes(run: Callable[[], object], num_logits: int) -> list[str]:
    """The kernels that process all logits, except matrix products."""
    with Kernels(num_logits) as kernels:
        run()
    return [name for name in kernels.names if name not in PASSIVE]


def marked(top_k: int, hard: bool = False, dtype: torch.dtype | None = None) -> tuple[TinyHead, Tensor, Any]:
    head, steps, num_places = TinyHead(), 3, 10
    frozen: Any = SimpleNamespace(logits=lambda hidden: hidden @ head.weight.detach().t())
    batch: Any = SimpleNamespace(token_ids=torch.arange(num_places + 2)[None])
    places = Positions(torch.zeros(num_places, dtype=torch.int64), torch.arange(1, num_places + 1))
    hidden = drawn(steps, num_places, 8, dtype=torch.float32)
    marker = Evaluator(head, frozen, lambda hidden, _: head.logits(hidden), top_k=top_k, hard=hard)  # type: ignore[arg-type]
    states = drawn(1, num_places + 2, 8, seed=3, dtype=torch.float32).detach()
    return head, hidden, lambda block=None: marker.evaluate(hidden, places, batch, states, block)


@pytest.mark.parametrize(("top_k", "hard"), [(0, False), (5, False), (0, True)])
def test_backward_recomputes_only_what_gradients_need(top_k: int, hard: bool) -> None:
    head, _, marks = marked(top_k, hard)
    found: list[Any] = []
    there = passes(lambda: found.append(marks()), 3 * 10 * 30)
    assert there == ["_log_softmax", *([] if hard else ["mul", "sum"]), "argmax"]
    loss = found[0].cross_entropy.sum() + 0.1 * found[0].top_k.sum()
    back = passes(loss.backward, 3 * 10 * 30)
    written = "new_zeros" if hard else "mul"
    assert back == ["_log_softmax", written, "_log_softmax_backward_data"]
    assert head.weight.grad is not None


def test_number_of_kernels_over_all_logits() -> None:
    head, hidden = TinyHead(), drawn(12, 8, dtype=torch.float32)
    labels = labelled(12, 30, 6, 2, torch.float32)
    found: list[Any] = []
    there = passes(lambda: found.append(node_losses(head, hidden, labels)), 12 * 30)  # type: ignore[arg-type]
    assert there == ["_softmax", "argmax", "argmax"]
    assert passes(found[0].cross_entropy.sum().backward, 12 * 30) == ["_softmax", "argmax", "mul"]


@pytest.mark.parametrize("block", [1, 4, 10])
def test_recomputed_blocks_have_plain_gradients(block: int) -> None:
    head, hidden, marks = marked(5)
    found = marks(block)
    loss = found.cross_entropy.sum() + 0.1 * found.top_k.sum()
    got = torch.autograd.grad(loss, (hidden, head.weight))
    states = drawn(1, 12, 8, seed=3, dtype=torch.float32).detach()[0, 1:11]
    labels = (states @ head.weight.detach().t()).softmax(dim=-1)
    whole, top = plain_entropies(head.logits(hidden), labels, torch.ones(10, dtype=torch.bool), 5)
    wanted = torch.autograd.grad(whole.sum() + 0.1 * top.sum(), (hidden, head.weight))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-5)
