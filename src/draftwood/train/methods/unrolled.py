"""Base of the methods for EAGLE-type heads: unroll the head and evaluate every step."""

import hashlib
import math
from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from draftwood.errors import OptionError
from draftwood.heads import Eagle3Head, EagleHead, Head, HeadConfig
from draftwood.train.attention import unroll
from draftwood.train.base import Batch, Losses, Signals
from draftwood.train.losses import Evaluation, Evaluator, Positions, accuracy, smooth_l1
from draftwood.train.methods.base import Method

NOISE_LENGTH = 512  # tokens of a text that the noise option refers to; longer texts get less noise


class Recipe(NamedTuple):
    """A loss: the sum over steps j of ``decay ** j`` times the weighted sum of its parts."""

    steps: int = 1
    decay: float = 1.0
    regression: float = 0.0  # weights
    classification: float = 1.0
    top_k_weight: float = 0.0
    top_k: int = 10
    noise: float = 0.0  # width of uniform noise on the target's features, for texts of 512 tokens
    detach: bool = False  # no gradient from a step into the previous one
    close_k: int = 0  # see Evaluation.close


class UnrolledMethod(Method):
    """Subclasses define the loss (``recipe``) and which predictions count."""

    kinds: ClassVar[tuple[str, ...]] = ("eagle",)
    head: EagleHead | Eagle3Head

    @classmethod
    def outputs_per_position(cls, options: Any, head: HeadConfig) -> int:
        return int(getattr(options, "steps", 1))  # EAGLE has no such option and one step

    @classmethod
    def scores_per_position(cls, options: Any, head: HeadConfig, length: int) -> int:
        """Return 0 for a single step: causal attention does not materialise scores."""
        return head.num_heads * length if cls.outputs_per_position(options, head) > 1 else 0

    @abstractmethod
    def recipe(self) -> Recipe: ...

    def losses(self, batch: Batch, signals: Signals) -> Losses:
        recipe = self.recipe()
        positions = Positions.of(batch)
        taps = signals.taps.to(next(self.head.parameters()).dtype)
        features = self.head.fuse(taps)  # [B, L, H]
        hidden = self._run_head(batch, features, positions, recipe)  # [S, P, H]
        evaluator = Evaluator(
            self.head,
            self.frozen,
            lambda hidden, _: self.head.logits(hidden),
            top_k=recipe.top_k if recipe.top_k_weight else 0,
            close_k=recipe.close_k,
        )
        evaluation = evaluator.evaluate(hidden, positions, batch, signals.hidden, self.block)
        distance = smooth_l1(hidden, positions.at(features).detach()) if recipe.regression else None
        return combine_losses(recipe, evaluation, distance, self.counted(evaluation, positions, batch))

    def counted(self, evaluation: Evaluation, positions: Positions, batch: Batch) -> Tensor:
        """Return which predictions count, ``[S, P]``."""
        return positions.reached(len(evaluation.right))

    def _run_head(self, batch: Batch, features: Tensor, positions: Positions, recipe: Recipe) -> Tensor:
        num_pairs = batch.token_ids.shape[1] - 2  # the last pair predicts the last token
        if not positions.number:
            return torch.zeros(recipe.steps, 0, features.shape[-1], device=features.device) + zero_of(self.head)
        if recipe.noise and self.head.training:
            noise = feature_noise(batch, features.shape[-1], recipe.noise, self.seed, self.step)
            features = features + noise.to(features.dtype)
        outputs = unroll(
            self.head,
            self.head.embed(batch.token_ids[:, 1 : num_pairs + 1]).to(features.dtype),
            features[:, :num_pairs],
            batch.positions()[:, :num_pairs],
            recipe.steps,
            detach=recipe.detach,
            checkpoints=self.checkpoints,
        )
        return positions.select(outputs, recipe.steps)


def feature_noise(batch: Batch, size: int, width: float, *seeds: int) -> Tensor:
    """Return uniform noise on features of ``size``, [B, L, size]: it depends on the tokens of a text and the seeds, not
    on its padding. Longer texts get less."""
    noise = torch.zeros(*batch.token_ids.shape, size, device=batch.token_ids.device)
    for row, (ids, length) in enumerate(zip(batch.token_ids.cpu(), batch.lengths.tolist(), strict=True)):
        digest = hashlib.blake2b(ids[:length].numpy().tobytes(), digest_size=6).digest()
        content = "".join(f"{seed} " for seed in seeds).encode() + digest
        seed = hashlib.blake2b(content, digest_size=6).digest()
        generator = torch.Generator(noise.device).manual_seed(int.from_bytes(seed, "big"))
        drawn = torch.rand(length, size, generator=generator, device=noise.device)
        noise[row, :length] = (drawn - 0.5) * (width * NOISE_LENGTH / length)
    return noise


def combine_losses(recipe: Recipe, evaluation: Evaluation, distance: Tensor | None, counted: Tensor) -> Losses:
    """Combine the losses of the ``counted [S, P]`` predictions. ``distance [S, P]`` is that of their features.

    All parts are divided by the number of predictions of step 0, so that batches of several processes can be averaged.
    """
    number = max(counted.shape[1], 1)
    decay = recipe.decay ** torch.arange(recipe.steps, device=counted.device)  # [S]
    weighted = counted * decay[:, None]  # [S, P]
    terms = [("classification", recipe.classification, evaluation.cross_entropy)]
    if distance is not None:
        terms.append(("regression", recipe.regression, distance))
    if recipe.top_k_weight:
        terms.append(("top_k", recipe.top_k_weight, evaluation.top_k))
    parts = {name: (weighted * each).sum() / number for name, _, each in terms}
    total = torch.stack([weight * parts[name] for name, weight, _ in terms]).sum()
    accuracies = {
        f"accuracy_{step}" if step else "accuracy": x for step, x in enumerate(accuracy(evaluation.right, counted))
    }
    logged = {"loss": total, **parts, **accuracies}
    weight = torch.tensor(float(counted.shape[1]), device=counted.device)
    return Losses(total, {name: value.detach() for name, value in logged.items()}, weight)


def zero_of(head: Head) -> Tensor:
    """Nothing to learn; but every parameter gets a gradient, which is zero."""
    return torch.stack([parameter.sum() for parameter in head.parameters()]).sum() * 0.0


def check_weights(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise OptionError(f"{name} must be a weight", got=repr(value), allowed="0 or more")


def check_some_weight(options: Any, *names: str) -> None:
    """A loss without any part teaches nothing."""
    check_weights(options, *names)
    if not any(getattr(options, name) for name in names):
        raise OptionError("At least one weight of the loss must be above 0", got="0 for all", allowed=names)
