"""The losses of the training methods: comparison with a slow reference, and invariances."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from draftwood.config import from_mapping
from draftwood.errors import DraftwoodError, OptionError
from draftwood.heads import HeadModule, HydraHead, MedusaHead
from draftwood.train.base import Batch, Losses, Signals
from draftwood.train.methods import METHODS, method_class
from draftwood.train.methods.base import Method
from draftwood.train.methods.unrolled import feature_noise
from tests.tools.head import causal
from tests.tools.train import KIND_OF, drafted, gradients, losses_of, method_for, random_examples, text_of

SIZES = [9, 4, 7, 2]
QUIET: dict[str, dict[str, Any]] = {"eagle": {"noise": 0.0}, "hass": {"noise": 0.0}, "griffin": {"noise": 0.0}}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("eagle", {}, {}),
    ("eagle", {"regression": 0.5, "classification": 0.1}, {"feature": "raw"}),
    ("hass", {}, {}),
    ("hass", {"steps": 4, "decay": 0.5, "top_k": 3, "top_k_weight": 2.0, "detach": False}, {"num_layers": 2}),
    ("eagle3", {}, {}),
    ("eagle3", {"steps": 3, "decay": 1.0}, {"draft_vocab_size": 150, "fc_norm": True}),
    ("eagle3", {"steps": 2}, {"own_embed": True, "norm_output": True, "norm_before_residual": True}),
    ("griffin", {"close": 40}, {}),
    ("griffin", {"close": 90, "steps": 4}, {"feature": "raw"}),
    ("medusa", {}, {}),
    ("medusa", {"soft": True, "decay": 0.5}, {"num_residual": 2}),
    ("hydra", {}, {}),
    ("hydra", {"soft": True}, {"prefix": True}),
]
every_case = pytest.mark.parametrize(
    ("name", "options", "changes"), CASES, ids=[f"{name}-{number}" for number, (name, _, _) in enumerate(CASES)]
)
every_method = pytest.mark.parametrize("name", KIND_OF)


def quiet(name: str, head: HeadModule | None = None, *, changes: Any = None, **options: Any) -> Method:
    """A method without noise."""
    return method_for(name, head, changes=changes, **{**QUIET.get(name, {}), **options})


# -- the slow reference ----------------------------------------------------------------------------------------------


class Guess:
    """A guess after position ``last``, reached by ``step`` steps; numbers in float64."""

    def __init__(self, method: Method, step: int, last: int, ids: Tensor, signals: Signals, logits: Tensor) -> None:
        head = method.head
        self.step, self.last = step, last
        self.log_probs = logits.double().log_softmax(dim=-1)
        target = method.frozen.logits(signals.hidden[last]).double()
        self.best = int(target.argmax())
        kept = head.target_ids(torch.arange(head.config.draft_vocab_size))
        self.labels = target[kept].softmax(dim=-1)
        self.known = self.best in kept
        self.right = int(head.target_ids(logits.argmax())) == self.best
        self.token = int(ids[last + 1])
        self.rank = int((logits > logits[head.draft_ids(ids[last + 1])]).sum())


def guesses(
    method: Method, batch: Batch, signals: Signals, num_steps: int
) -> Iterator[tuple[int, Guess, Tensor, Tensor]]:
    """For all counted guesses: text, guess, the head's output and the target's feature."""
    head = method.head
    for text in range(len(batch.lengths)):
        ids, own = text_of(batch, signals, text)
        features = head.fuse(own.taps)
        for last in range(1, len(ids) - 1):
            if not batch.answered[text, last + 1]:
                continue
            for step in range(min(num_steps, last)):
                root = last - 1 - step
                if isinstance(head, (MedusaHead, HydraHead)):
                    output = head(features, torch.arange(len(ids)), causal)[root]
                    logits = head.logits_at(step + 1, output, head.embed(ids[root + 1 : last + 1]))
                else:
                    output = drafted(head, ids, features, root, step + 1)[-1]
                    logits = head.logits(output)
                yield text, Guess(method, step, last, ids, own, logits), output, features[last]


@torch.no_grad()
def reference(method: Method, batch: Batch, signals: Signals) -> tuple[float, dict[str, float], int]:
    """The loss, accuracies by name and the number of positions, guess by guess."""
    options = method.options
    ahead = isinstance(method.head, (MedusaHead, HydraHead))
    steps = method.head.config.num_heads_ahead if ahead else getattr(options, "steps", 1)
    decay = getattr(options, "decay", 1.0)
    total, hits, seen, missed = 0.0, [0] * steps, [0] * steps, set()
    for text, guess, output, feature in sorted(
        guesses(method, batch, signals, steps), key=lambda found: (found[1].step, found[0], found[1].last)
    ):
        step, last = guess.step, guess.last
        if hasattr(options, "close"):
            if (text, last - 1, step - 1) in missed:
                missed.add((text, last, step))
                continue
            if guess.rank >= options.close:
                missed.add((text, last, step))
        seen[step] += 1
        hard = ahead and not options.soft
        hits[step] += int(guess.log_probs.argmax()) == guess.token if hard else guess.right
        weight = decay**step
        if hard:
            total -= weight * float(guess.log_probs[guess.token])
            continue
        if guess.known:
            each = guess.labels * guess.log_probs
            total -= weight * getattr(options, "classification", 1.0) * float(each.sum())
            if hasattr(options, "top_k"):
                chosen = guess.labels.argsort(descending=True)[: options.top_k]
                total -= weight * options.top_k_weight * float(each[chosen].sum())
        if hasattr(options, "regression"):
            away = (output.double() - feature.double()).abs()
            smooth = torch.where(away < 1, away.square() / 2, away - 0.5)
            total += weight * options.regression * float(smooth.mean())
    names = ["accuracy", *(f"accuracy_{step}" for step in range(1, steps))]
    accuracies = {name: hit / max(count, 1) for name, hit, count in zip(names, hits, seen, strict=True)}
    return total / seen[0], accuracies, seen[0]


@every_case
def test_loss_matches_slow_reference(name: str, options: dict[str, Any], changes: dict[str, Any]) -> None:
    method = quiet(name, changes=changes, **options)
    batch = Batch.of(random_examples(SIZES, seed=3))
    signals = method.frozen.signals(batch)
    losses = method.losses(batch, signals)
    total, accuracies, places = reference(method, batch, signals)
    assert losses.total.item() == pytest.approx(total, rel=2e-5)
    assert float(losses.weight) == places == sum(max(size - 2, 0) for size in SIZES)
    assert {key: float(value) for key, value in losses.parts.items() if "accuracy" in key} == pytest.approx(accuracies)
    assert float(losses.parts["loss"]) == losses.total.item()


def test_griffin_masks_some_but_not_all_guesses() -> None:
    """Otherwise the comparison above would not test its mask."""
    examples = random_examples(SIZES, seed=3)
    loss = {close: losses_of(quiet("griffin", close=close), examples).total.item() for close in (1, 40, 258)}
    assert loss[1] < loss[40] < loss[258]
    assert loss[258] == pytest.approx(losses_of(quiet("hass"), examples).total.item())


# -- gradients -------------------------------------------------------------------------------------------------------


@every_case
def test_gradients_reach_all_head_parameters_but_not_target(
    name: str, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    method = method_for(name, changes=changes, **options)
    for parameter, gradient in gradients(method, random_examples([12, 9])).items():
        assert gradient is not None, parameter
        assert gradient.any(), parameter
    parts = method.frozen.parts
    assert not any(part.requires_grad or part.grad is not None for part in (parts.embed, parts.norm, parts.head))


def test_tokens_outside_the_vocabulary_are_ignored() -> None:
    method = quiet("eagle3", changes={"draft_vocab_size": 2}, steps=1)
    method.head.set_vocabulary(torch.tensor([0, 1]))
    examples = random_examples([12], seed=1)
    batch = Batch.of(examples)
    signals = method.frozen.signals(batch)
    best = method.frozen.logits(signals.hidden)[0, 1:-1].argmax(dim=-1)
    assert (best > 1).all()
    losses = method.losses(batch, signals)
    assert losses.parts["loss"] == losses.parts["accuracy"] == 0.0
    assert losses.weight == 10


@every_method
def test_batch_without_guesses_gives_zero_gradients(name: str) -> None:
    method = method_for(name)
    for examples in (random_examples([5, 2], prompt=9), random_examples([1])):
        assert float(losses_of(method, examples).weight) == 0.0
        assert all(gradient is not None and not gradient.any() for gradient in gradients(method, examples).values())


# -- invariances -----------------------------------------------------------------------------------------------------


def joined(results: list[Losses]) -> dict[str, float]:
    """Several results as one, by their weights."""
    whole = sum(float(losses.weight) for losses in results)
    names = results[0].parts
    return {name: sum(float(r.parts[name]) * float(r.weight) for r in results) / whole for name in names}


@every_method
def test_batch_equals_single_texts(name: str) -> None:
    """Also with noise, which belongs to the text."""
    method = method_for(name)
    examples = random_examples([14, 9, 11], prompt=6)
    together = losses_of(method, examples)
    alone = [losses_of(method, [example]) for example in examples]
    parts = {key: float(value) for key, value in together.parts.items()}
    if name == "griffin":  # the share of masked deep guesses differs between texts
        parts = {key: value for key, value in parts.items() if not key.startswith("accuracy_")}
    assert {key: joined(alone)[key] for key in parts} == pytest.approx(parts, rel=1e-4)
    assert sum(float(losses.weight) for losses in alone) == float(together.weight)


@every_method
@pytest.mark.parametrize("block", [1, 3, 1000])
def test_block_size_does_not_change_the_loss(name: str, block: int) -> None:
    method = method_for(name)
    examples = random_examples([12, 8])
    wanted_loss, wanted = losses_of(method, examples), gradients(method, examples)
    method.block = block
    found_loss, found = losses_of(method, examples), gradients(method, examples)
    assert found_loss.total.item() == pytest.approx(wanted_loss.total.item(), rel=1e-5)
    for parameter, gradient in wanted.items():
        assert (found[parameter] - gradient).norm() <= 1e-5 * gradient.norm(), parameter


@pytest.mark.parametrize("name", ["eagle", "hass", "eagle3", "griffin"])
def test_activation_checkpointing_does_not_change_gradients(name: str) -> None:
    method = method_for(name)
    examples = random_examples([12, 8])
    wanted = gradients(method, examples)
    method.checkpoints = True
    torch.testing.assert_close(gradients(method, examples), wanted)


def test_default_block_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    method = quiet("hass")
    examples = random_examples([12, 8])
    wanted = losses_of(method, examples).total.item()
    monkeypatch.setattr("draftwood.train.losses.evaluator.MAX_LOGITS_ON_CPU", 5000)
    assert losses_of(method, examples).total.item() == pytest.approx(wanted, rel=1e-6)


# -- noise and stages ------------------------------------------------------------------------------------------------


def test_noise_depends_on_seed_and_step() -> None:
    examples = random_examples([12, 8])
    head = quiet("eagle").head

    def total(seed: int, step: int, noise: float = 20.0) -> float:
        method = method_for("eagle", head, seed=seed, noise=noise)
        method.begin_step(step, 10)
        return losses_of(method, examples).total.item()

    assert total(0, 0) == total(0, 0)
    assert total(3, 4) == total(3, 4)
    assert len({total(0, 0), total(0, 1), total(1, 0), total(0, 0, noise=0.0)}) == 4


def test_noise_has_requested_width_and_shrinks_with_length() -> None:
    noise = feature_noise(Batch.of(random_examples([512, 128])), 48, 0.5, 0, 0)
    assert float(noise[0].max()) == pytest.approx(0.25, rel=1e-2) == -float(noise[0].min())
    assert float(noise[1, :128].max()) == pytest.approx(1.0, rel=1e-2)
    assert not noise[1, 128:].any()


def test_no_noise_in_evaluation_mode() -> None:
    examples = random_examples([12, 8])
    noisy = method_for("eagle", noise=20.0)
    noisy.head.eval()
    assert losses_of(noisy, examples).total.item() == losses_of(quiet("eagle", noisy.head), examples).total.item()


def test_griffin_adds_steps_one_by_one() -> None:
    method = method_for("griffin", steps=3)
    found = []
    for step in range(9):
        method.begin_step(step, 9)
        found.append(method.recipe().steps)
    assert found == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert "accuracy_2" in losses_of(method, random_examples([9])).parts
    method.begin_step(0, 9)
    assert "accuracy_1" not in losses_of(method, random_examples([9])).parts
    at_once = method_for("griffin", steps=3, staged=False)
    at_once.begin_step(0, 9)
    assert at_once.recipe().steps == 3


def test_griffin_trains_eagle3_heads_without_their_features() -> None:
    method = method_for("griffin", quiet("eagle3").head)
    assert "regression" not in losses_of(method, random_examples([9])).parts


# -- names and options -----------------------------------------------------------------------------------------------


def test_methods_are_found_by_name() -> None:
    for name in KIND_OF:
        assert method_class(name).name == name
    assert set(KIND_OF) | {"talf", "gto", "reach"} == set(METHODS)
    with pytest.raises(OptionError, match="Did you mean 'hass'"):
        method_class("has")


def test_unknown_method_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "lost", "draftwood.train.methods.lost:Lost")
    with pytest.raises(DraftwoodError, match="'lost' cannot be loaded"):
        method_class("lost")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("eagle", {"regression": -1.0}, "regression must be a weight"),
        ("eagle", {"regression": 0.0, "classification": 0}, "At least one weight"),
        ("eagle", {"noise": float("nan")}, "noise must be a weight"),
        ("eagle", {"steps": 3}, "has no option 'steps'"),
        ("hass", {"steps": 0}, "steps must be a whole number"),
        ("hass", {"decay": 1.5}, "decay must be a fraction"),
        ("hass", {"detach": 1}, "detach must be true or false"),
        ("griffin", {"close": 0}, "close must be a whole number"),
        ("griffin", {"steps": "3"}, "steps must be a whole number"),
        ("eagle3", {"decay": True}, "decay must be a fraction"),
        ("medusa", {"soft": "yes"}, "soft must be true or false"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        from_mapping(method_class(name).Options, options, name)


def test_a_head_of_another_kind_is_refused() -> None:
    head = quiet("medusa").head
    with pytest.raises(OptionError, match="'eagle' does not train heads of this kind"):
        method_for("eagle", head)


def test_half_precision_runs_under_autocast() -> None:
    """Losses are float32 and close to the exact ones."""
    examples = random_examples([24, 20])
    for name in KIND_OF:
        method = quiet(name)
        exact = losses_of(method, examples)
        batch = Batch.of(examples)
        signals = method.frozen.signals(batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = method.losses(batch, signals)
        rounded.total.backward()
        assert rounded.total.dtype == torch.float32
        assert rounded.total.item() == pytest.approx(exact.total.item(), rel=0.05), name
