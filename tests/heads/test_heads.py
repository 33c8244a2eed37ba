"""Draft heads as modules: shapes, caches, gradients, and comparison with independent references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftwood.heads import KINDS, Eagle3Head, EagleHead, HydraHead, MedusaHead, build_head, default_head_config
from draftwood.models.config import Rope
from draftwood.targets import TargetParts
from draftwood.targets.native.rope import inverse_frequencies
from tests.tools.head import SMALL, GrowingCache, causal, random_head, random_parts

LLAMA3 = Rope(kind="llama3", theta=500.0, factor=8.0, original_context=64)
EAGLE3_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "vocabulary": {"draft_vocab_size": 17},
    "residual": {"norm_before_residual": True},
    "norms": {"norm_before_fc": True, "fc_norm": True, "norm_output": True},
    "biases": {"fc_bias": True, "qkv_bias": True, "o_bias": True, "qk_norm": True},
    "deep": {"num_layers": 3, "rope": LLAMA3},
    "narrow": {"hidden_size": 16, "own_embed": True, "draft_vocab_size": 17},
    "borrowed": {"own_lm_head": False},
    "two taps": {"num_taps": 2, "taps": (1, 9)},
}


def inputs(head: EagleHead | Eagle3Head, *shape: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens' embeddings, features of random taps, and positions."""
    generator = torch.Generator().manual_seed(seed)
    config = head.config
    tokens = torch.randint(config.vocab_size, shape, generator=generator)
    taps = torch.randn(*shape, config.num_taps * config.target_hidden_size, generator=generator)
    positions = torch.arange(shape[-1]).expand(shape) + 3
    weight = head.fc.weight
    return head.embed(tokens).to(weight.dtype), head.fuse(taps.to(weight.dtype)), positions


def bound(kind: str, seed: int = 0, **changes: Any) -> Any:
    head = random_head(kind, SMALL, seed, **changes)
    head.bind(random_parts(SMALL))
    return head


# -- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("variant", EAGLE3_VARIANTS)
def test_eagle3_accepts_any_batch(variant: str, shape: tuple[int, ...]) -> None:
    head = bound("eagle3", **EAGLE3_VARIANTS[variant])
    hidden = head(*inputs(head, *shape), causal)
    assert hidden.shape == (*shape, head.config.hidden_size)
    logits = head.logits(hidden)
    assert logits.shape == (*shape, head.config.draft_vocab_size)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_batch_equals_single_rows(kind: str) -> None:
    head = bound(kind)
    embeds, features, positions = inputs(head, 3, 6)
    together = head(embeds, features, positions, causal)
    for row in range(3):
        alone = head(embeds[row], features[row], positions[row], causal)
        torch.testing.assert_close(together[row], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (4,), (2, 4)], ids=str)
@pytest.mark.parametrize(("kind", "changes"), [("medusa", {}), ("hydra", {}), ("hydra", {"num_residual": 3})])
def test_multi_token_heads_accept_any_batch(kind: str, changes: dict[str, Any], shape: tuple[int, ...]) -> None:
    head = bound(kind, num_heads_ahead=3, **changes)
    hidden = torch.randn(*shape, SMALL.hidden_size)
    for depth in (1, 2, 3):
        path = torch.randn(*shape, depth, SMALL.hidden_size)
        logits = head.logits_at(depth, hidden, path)
        assert logits.shape == (*shape, SMALL.vocab_size)
        assert logits.dtype == torch.float32


def test_hydra_depends_on_the_path_and_medusa_does_not() -> None:
    hidden, path = torch.randn(SMALL.hidden_size), torch.randn(2, SMALL.hidden_size)
    for kind, depends in (("hydra", True), ("medusa", False)):
        head = bound(kind)
        for place in range(2):
            other = path.clone()
            other[place] += 1.0
            same = torch.equal(head.logits_at(2, hidden, path), head.logits_at(2, hidden, other))
            assert same != depends


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_gives_float32_logits_near_those_of_float32(kind: str) -> None:
    exact = bound(kind).double()
    half = random_head(kind, SMALL).to(torch.bfloat16)
    half.bind(random_parts(SMALL, dtype=torch.bfloat16))
    exact.bind(TargetParts(*(t.double() for t in half.parts[:3]), SMALL.norm_eps))
    exact.load_state_dict(half.state_dict())
    hidden, path = torch.randn(7, SMALL.hidden_size).bfloat16(), torch.randn(7, 1, SMALL.hidden_size).bfloat16()
    with torch.no_grad():
        if isinstance(half, MedusaHead | HydraHead):
            got, wanted = half.logits_at(1, hidden, path), exact.logits_at(1, hidden.double(), path.double())
        else:
            got, wanted = half.logits(hidden), exact.logits(hidden.double())
    assert got.dtype == torch.float32
    assert (got.bfloat16().float() != got).any()  # the output was not rounded
    torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.1)


# -- caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [[1] * 6, [3, 1, 2], [5, 1]], ids=str)
@pytest.mark.parametrize(
    ("kind", "changes"), [("eagle", {"num_layers": 2}), ("eagle3", {}), ("eagle3", {"num_layers": 2})]
)
def test_step_by_step_with_a_cache_equals_one_causal_pass(kind: str, changes: dict[str, Any], steps: list[int]) -> None:
    head = bound(kind, **changes)
    embeds, features, positions = inputs(head, 6)
    whole = head(embeds, features, positions, causal)
    cache, parts, start = GrowingCache(), [], 0
    for size in steps:
        rows = slice(start, start + size)
        parts.append(head(embeds[rows], features[rows], positions[rows], cache.attend))
        start += size
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)


def test_hydra_prefix_layer_has_a_cache() -> None:
    head, plain = bound("hydra", prefix=True), bound("hydra")
    features, positions = torch.randn(2, 5, SMALL.hidden_size), torch.arange(5).expand(2, 5)
    whole = head(features, positions, causal)
    cache = GrowingCache()
    parts = [head(features[:, i : i + 1], positions[:, i : i + 1], cache.attend) for i in range(5)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(whole, features)
    assert plain(features, positions, causal) is features


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_only_relative_positions_matter(kind: str) -> None:
    head = bound(kind)
    embeds, features, positions = inputs(head, 4)
    here, there = (head(embeds, features, positions + shift, causal) for shift in (0, 40))
    torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-4)
    spread = head(embeds, features, positions * 3, causal)
    assert not torch.allclose(here, spread, rtol=1e-3, atol=1e-3)


# -- EAGLE-3 and EAGLE against independent references -----------------------------------------------------------------


def reference_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def reference_rotation(x: Tensor, position: int, theta: float) -> Tensor:
    """With complex numbers: pair i is rotated by position / theta ** (2i / D)."""
    half = x.shape[-1] // 2
    turns = position / theta ** (torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(turns), turns)
    return torch.cat([turned.real, turned.imag], dim=-1)


def reference_layer(w: dict[str, Tensor], attended: Tensor, residual: Tensor, head: Any, first_position: int) -> Tensor:
    """Position by position, head by head."""
    config = head.config
    dim, group = config.head_dim, config.num_heads // config.num_kv_heads
    rows = []
    for now in range(len(attended)):
        mixed = []
        for h in range(config.num_heads):
            kv = h // group
            project = w["self_attn.q_proj.weight"][h * dim : (h + 1) * dim]
            query = reference_rotation(project @ attended[now], first_position + now, config.rope.theta)
            scores, values = [], []
            for past in range(now + 1):
                k = w["self_attn.k_proj.weight"][kv * dim : (kv + 1) * dim] @ attended[past]
                scores.append(query @ reference_rotation(k, first_position + past, config.rope.theta) / dim**0.5)
                values.append(w["self_attn.v_proj.weight"][kv * dim : (kv + 1) * dim] @ attended[past])
            mixed.append((torch.stack(scores).softmax(0)[:, None] * torch.stack(values)).sum(0))
        hidden = residual[now] + w["self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = reference_norm(hidden, w["post_attention_layernorm.weight"], config.norm_eps)
        gate = w["mlp.gate_proj.weight"] @ x
        rows.append(
            hidden + w["mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * (w["mlp.up_proj.weight"] @ x))
        )
    return torch.stack(rows)


def layer_weights(head: Any, index: int) -> dict[str, Tensor]:
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): t for name, t in head.state_dict().items() if name.startswith(prefix)}


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_eagle3_equals_the_reference(norm_before_residual: bool, norms: bool, num_layers: int) -> None:
    flags = dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output"), norms)
    head = random_head(
        "eagle3",
        SMALL,
        norm_before_residual=norm_before_residual,
        num_layers=num_layers,
        draft_vocab_size=11,
        dtype=torch.float64,
        **flags,
    )
    assert isinstance(head, Eagle3Head)
    head.bind(random_parts(SMALL, dtype=torch.float64))
    size, eps, state = SMALL.hidden_size, SMALL.norm_eps, head.state_dict()
    taps = torch.randn(4, 3 * size, dtype=torch.float64)
    tokens = torch.tensor([1, 5, 2, 9])
    got = head(head.embed(tokens), head.fuse(taps), torch.arange(7, 11), causal)

    if norms:
        taps = reference_norm(taps, state["input_norm.weight"], eps)
        parts = taps.split(size, dim=-1)
        taps = torch.cat([reference_norm(p, state[f"fc_norm.{i}.weight"], eps) for i, p in enumerate(parts)], dim=-1)
    feature = taps @ state["fc.weight"].T
    w = layer_weights(head, 0)
    normed = reference_norm(feature, w["hidden_norm.weight"], eps)
    embeds = reference_norm(head.parts.embed[tokens], w["input_layernorm.weight"], eps)
    residual = normed if norm_before_residual else feature
    hidden = reference_layer(w, torch.cat([embeds, normed], dim=-1), residual, head, 7)
    for index in range(1, num_layers):
        w = layer_weights(head, index)
        hidden = reference_layer(w, reference_norm(hidden, w["input_layernorm.weight"], eps), hidden, head, 7)
    output = reference_norm(hidden, state["norm.weight"], eps)
    torch.testing.assert_close(got, output if norms else hidden, rtol=1e-5, atol=1e-5)
    logits = (output @ state["lm_head.weight"].T).float()
    torch.testing.assert_close(head.logits(got), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("feature", ["normed", "raw"])
def test_eagle_equals_the_reference(feature: str) -> None:
    head = random_head("eagle", SMALL, feature=feature, num_layers=2, dtype=torch.float64)
    head.bind(random_parts(SMALL, dtype=torch.float64))
    assert isinstance(head, EagleHead)
    state, parts, eps = head.state_dict(), head.parts, SMALL.norm_eps
    assert "layers.0.input_layernorm.weight" not in state
    taps = torch.randn(4, SMALL.hidden_size, dtype=torch.float64)
    tokens = torch.tensor([1, 5, 2, 9])
    got = head(head.embed(tokens), head.fuse(taps), torch.arange(4), causal)

    read = reference_norm(taps, parts.norm, eps) if feature == "normed" else taps
    hidden = torch.cat([parts.embed[tokens], read], dim=-1) @ state["fc.weight"].T + state["fc.bias"]
    hidden = reference_layer(layer_weights(head, 0), hidden, hidden, head, 0)
    w = layer_weights(head, 1)
    hidden = reference_layer(w, reference_norm(hidden, w["input_layernorm.weight"], eps), hidden, head, 0)
    torch.testing.assert_close(got, hidden, rtol=1e-5, atol=1e-5)
    output = hidden if feature == "normed" else reference_norm(hidden, parts.norm, eps)
    torch.testing.assert_close(head.logits(got), (output @ parts.head.T).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_residual", [1, 2, 3])
def test_medusa_equals_the_reference(num_residual: int) -> None:
    head = bound("medusa", num_residual=num_residual).double()
    state, hidden = head.state_dict(), torch.randn(5, SMALL.hidden_size, dtype=torch.float64)
    got = head.logits_at(3, hidden, torch.zeros(5, 3, SMALL.hidden_size))
    for _ in range(num_residual):
        inner = hidden @ state["branches.2.block.linear.weight"].T + state["branches.2.block.linear.bias"]
        hidden = hidden + inner / (1 + torch.exp(-inner))
    torch.testing.assert_close(got, (hidden @ state["branches.2.lm_head.weight"].T).float())


@pytest.mark.parametrize("num_residual", [1, 2, 3])
def test_hydra_equals_the_reference(num_residual: int) -> None:
    head = bound("hydra", num_residual=num_residual).double()
    size = SMALL.hidden_size
    hidden, path = torch.randn(5, size, dtype=torch.float64), torch.randn(5, 3, size, dtype=torch.float64)
    got = head.logits_at(3, hidden, path)

    def linear(x: Tensor, name: str) -> Tensor:
        weight, bias = (head.state_dict()[f"branches.2.{name}.{part}"] for part in ("weight", "bias"))
        return x @ weight.T + bias

    x = torch.cat([hidden, path[:, 0], path[:, 1], path[:, 2]], dim=-1)
    inner = linear(x, "join.linear")
    x = linear(x, "join.res_connection") + inner * inner.sigmoid()
    for _ in range(num_residual - 1):
        inner = linear(x, "block.linear")
        x = x + inner * inner.sigmoid()
    torch.testing.assert_close(got, linear(x, "lm_head").float())


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", EAGLE3_VARIANTS)
def test_gradients_reach_every_parameter_of_eagle3(variant: str) -> None:
    head = bound("eagle3", **EAGLE3_VARIANTS[variant]).train()
    hidden = head(*inputs(head, 2, 5), causal)
    check_gradients(head, head.logits(hidden))


@pytest.mark.parametrize("feature", ["normed", "raw"])
def test_gradients_reach_every_parameter_of_eagle(feature: str) -> None:
    head = bound("eagle", num_layers=2, feature=feature).train()
    check_gradients(head, head.logits(head(*inputs(head, 2, 5), causal)))


@pytest.mark.parametrize(
    ("kind", "changes"), [("medusa", {}), ("hydra", {}), ("hydra", {"prefix": True, "num_residual": 2})]
)
@pytest.mark.parametrize("fresh", [False, True])
def test_gradients_reach_every_parameter_of_multi_token_heads(kind: str, changes: dict[str, Any], fresh: bool) -> None:
    """Also for a newly initialized head, although its blocks are still zero."""
    head = bound(kind, **changes).train()
    if fresh:
        head.reset_parameters(torch.Generator().manual_seed(0))
    features, positions = torch.randn(2, 5, SMALL.hidden_size), torch.arange(5).expand(2, 5)
    hidden = head(features, positions, causal)
    paths = torch.randn(2, 5, 4, SMALL.hidden_size)
    check_gradients(head, *(head.logits_at(depth, hidden, paths[..., :depth, :]) for depth in range(1, 5)))


def check_gradients(head: Any, *logits: Tensor) -> None:
    sum(each.log_softmax(-1)[..., 0].sum() for each in logits).backward()
    without = [n for n, p in head.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
    assert not without
    assert all(not part.requires_grad and part.grad is None for part in head.parts[:3])


@pytest.mark.parametrize("kind", KINDS)
def test_target_parts_are_not_parameters_or_state(kind: str) -> None:
    head = random_head(kind, SMALL)
    before = set(head.state_dict())
    num_parameters = head.num_parameters()
    head.bind(random_parts(SMALL))
    assert set(head.state_dict()) == before
    assert head.num_parameters() == num_parameters == sum(p.numel() for p in head.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_initialization_is_deterministic_by_seed(kind: str) -> None:
    first, second, other = (build_head(default_head_config(kind, SMALL)) for _ in range(3))
    for head, seed in ((first, 4), (second, 4), (other, 5)):
        head.bind(random_parts(SMALL))
        head.reset_parameters(torch.Generator().manual_seed(seed))
        assert all(torch.isfinite(p).all() for p in head.parameters())
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    random_ones = kind in ("eagle", "eagle3")  # the others start as a copy of the target
    assert all(map(torch.equal, first.parameters(), other.parameters())) != random_ones


@pytest.mark.parametrize(("kind", "changes"), [("medusa", {"num_residual": 2}), ("hydra", {"num_residual": 2})])
def test_multi_token_heads_start_as_target_lm_head(kind: str, changes: dict[str, Any]) -> None:
    head = bound(kind, **changes)
    head.reset_parameters(torch.Generator().manual_seed(0))
    hidden, path = torch.randn(3, SMALL.hidden_size), torch.randn(3, 2, SMALL.hidden_size)
    torch.testing.assert_close(head.logits_at(2, hidden, path), hidden @ head.parts.head.T)


def test_eagle3_starts_with_target_rows_of_its_vocabulary() -> None:
    head = bound("eagle3", draft_vocab_size=7)
    chosen = torch.tensor([3, 4, 8, 20, 21, 30, 39])
    head.set_vocabulary(chosen)
    head.reset_parameters(torch.Generator().manual_seed(0))
    assert torch.equal(head.lm_head.weight, head.parts.head[chosen])
    assert torch.equal(head.norm.weight, head.parts.norm)


def test_head_keeps_rope_frequencies_when_dtype_changes() -> None:
    head = build_head(default_head_config("eagle3", SMALL), dtype=torch.bfloat16).float()
    turned = head._rotation(torch.tensor([1001]), torch.float64)  # type: ignore[union-attr]
    frequencies = inverse_frequencies(SMALL.rope, SMALL.head_dim).double()
    torch.testing.assert_close(turned.cos.flatten()[:3], (1001 * frequencies).cos(), rtol=0, atol=1e-4)
