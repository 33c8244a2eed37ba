"""One optimiser step after the other. Read `Trainer.step` first: the whole of training is there.

A step takes micro-batches. Each has a loss that is a mean over the positions that count in it; what is followed is the
mean over those of all micro-batches of all processes, whatever number of positions each of them has. So gradients are
summed with the numbers of positions as weights and divided by their sum in the end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from draftwood.errors import DraftwoodError, OptionError
from draftwood.heads import HeadModule
from draftwood.train.base import Batch, Example, Losses, Signals
from draftwood.train.config import TrainConfig
from draftwood.train.loop.checkpoint import Place, Progress, Snapshot, random_state, set_random_state, whole_head
from draftwood.train.loop.distributed import Processes, gather_objects, gradients_meet, shared_module, whole
from draftwood.train.loop.schedule import RunningMean, learning_rate, make_optimizer
from draftwood.train.methods import Method

FIRST_GUESS = 1000  # steps, before the first is timed


class Texts(Protocol):
    """What is trained on: `train.data.TrainingData`, or anything that gives batches as it does."""

    def __getitem__(self, index: int) -> Example: ...

    def batches(
        self, max_tokens: int, *, seed: int = 0, epoch: int = 0, rank: int = 0, world_size: int = 1, start: int = 0
    ) -> Sequence[Sequence[int]]:
        """Numbers of examples; ``start``: so many of this process's batches are over already."""


class SignalSource(Protocol):
    """Who says what the target thinks along a batch: the target itself, or what was kept of it."""

    def signals(self, batch: Batch) -> Signals: ...


class NotFiniteError(DraftwoodError):
    """A loss or its gradients are no numbers any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    step: int  # steps that are done now
    loss: float
    parts: Mapping[str, float]  # of this process
    weight: float  # positions that counted
    lr: float
    gradient_norm: float
    tokens: int  # of all processes
    seconds: float
    target_seconds: float  # of these, in the target's forward


class Stream:
    """The micro-batches of one process, epoch after epoch."""

    def __init__(self, texts: Texts, max_tokens: int, seed: int, processes: Processes, place: Place) -> None:
        self._texts, self._max_tokens, self._seed, self._processes = texts, max_tokens, seed, processes
        self.place = place
        self._left = self._batches_from(place)

    def take(self) -> tuple[Place, list[Example]]:
        """The next one, and where it stood."""
        if not self._left:
            self.place = Place(self.place.epoch + 1, 0)
            self._left = self._batches_from(self.place)
        place = self.place
        self.place = Place(place.epoch, place.batch + 1)
        return place, [self._texts[index] for index in self._left.popleft()]

    def _batches_from(self, place: Place) -> deque[Sequence[int]]:
        own = {"rank": self._processes.rank, "world_size": self._processes.world_size, "start": place.batch}
        found = deque(self._texts.batches(self._max_tokens, seed=self._seed, epoch=place.epoch, **own))
        if not found and not place.batch:
            raise OptionError(
                "There is nothing to train on",
                got=f"fewer batches than the {self._processes.world_size} processes",
                next_step="Make more data, hold out fewer texts, or lower run.max_tokens.",
            )
        return found


class LossModule(nn.Module):
    """A method as a module: what several processes share is one forward of it."""

    def __init__(self, method: Method, *, shared: bool = False) -> None:
        super().__init__()
        self.head = method.head
        self._method = method
        self._shared = shared

    def forward(self, batch: Batch, signals: Signals) -> Losses:
        losses = self._method.losses(batch, signals)
        if not self._shared:
            return losses
        # Processes wait for a gradient of every parameter; a batch may have left some of them out.
        nothing = torch.stack([parameter.sum() for parameter in self.head.parameters()]).sum() * 0.0
        return losses._replace(total=losses.total + nothing)


class Trained(NamedTuple):
    """One micro-batch, behind its backward."""

    place: Place
    losses: Losses
    tokens: int


class Trainer:
    def __init__(
        self,
        config: TrainConfig,
        method: Method,
        texts: Texts,
        source: SignalSource,
        num_steps: int,
        processes: Processes | None = None,
    ) -> None:
        self.config = config
        self.method = method
        self.head: HeadModule = method.head  # type: ignore[assignment]
        self._num_steps = num_steps
        self.processes = processes or Processes()
        if config.optim.minutes and self.processes.world_size > 1:
            raise OptionError(
                "Several processes have no common clock",
                got=f"optim.minutes with {self.processes.world_size} of them",
                next_step="Set optim.steps or optim.epochs.",
            )
        self.progress = Progress()
        self.device = next(self.head.parameters()).device
        self._texts = texts
        self._source = source
        self.dtype = compute_dtype(config.run.dtype, self.device)
        method.checkpoints = config.run.checkpointing
        self.module = shared_module(
            LossModule(method, shared=self.processes.world_size > 1), config.run.strategy, self.processes
        )
        self.optimizer = make_optimizer(config.optim, self.head)
        self.mean = RunningMean(self.head.parameters(), config.optim.ema) if config.optim.ema else None
        self._clock = TargetClock(self.device)
        self._stream = self._stream_from(Place())

    @property
    def num_steps(self) -> int:
        """Of the whole run; where a time was set, as many as there seems to be time for."""
        progress, limit = self.progress, 60.0 * self.config.optim.minutes
        if not limit:
            return self._num_steps
        if progress.seconds >= limit:
            return progress.step
        return max(progress.step + 1, round(progress.step * limit / progress.seconds)) if progress.step else FIRST_GUESS

    @property
    def is_done(self) -> bool:
        return self.progress.step >= self.num_steps

    def step(self) -> StepResult:
        """One step of the optimiser over ``accumulate`` micro-batches of every process."""
        started, optim, step = time.perf_counter(), self.config.optim, self.progress.step
        self.head.train()
        num_steps = self.num_steps
        self.method.begin_step(step, num_steps)
        self.optimizer.zero_grad(set_to_none=True)
        done = [self._backward(last=index == optim.accumulate - 1) for index in range(optim.accumulate)]
        loss, weight, tokens = self._joined(done)
        norm = self._divide_gradients(weight)
        if not torch.isfinite(norm):
            self._stop_at(done, "The gradients are not finite")
        rate = learning_rate(optim, step, num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.progress.step += 1
        self.progress.place = self._stream.place
        if self.mean is not None:
            self.mean.update(step)
        result = StepResult(
            step=self.progress.step,
            loss=loss,
            parts=mean_parts([each.losses for each in done]),
            weight=weight,
            lr=rate,
            gradient_norm=float(norm),
            tokens=tokens,
            seconds=time.perf_counter() - started,
            target_seconds=self._clock.taken(),
        )
        self.progress.seconds += result.seconds
        return result

    def _backward(self, *, last: bool) -> Trained:
        place, examples = self._stream.take()
        batch = Batch.of(examples, self.device)
        with self._clock.running():
            signals = self._source.signals(batch)
        with gradients_meet(self.module, last):
            with self.autocast():
                losses: Losses = self.module(batch, signals)
            (losses.total * losses.weight).backward()  # type: ignore[no-untyped-call]
        return Trained(place, _detached(losses), sum(len(example.token_ids) for example in examples))

    def _joined(self, done: Sequence[Trained]) -> tuple[float, float, int]:
        """Loss, positions that count and tokens over all processes; here the host waits for the device."""
        totals = torch.stack([each.losses.total.double() for each in done])  # [A]
        weights = torch.stack([each.losses.weight.double() for each in done])  # [A]
        tokens = float(sum(each.tokens for each in done))
        bad = torch.zeros(self.processes.world_size, len(done), dtype=torch.float64, device=self.device)
        bad[self.processes.rank] = (~torch.isfinite(totals)).double()
        numbers = torch.cat([torch.stack([(totals * weights).sum(), weights.sum()]), bad.flatten()])
        tally = torch.cat([numbers, numbers.new_tensor([tokens])])
        loss, weight, *flags, tokens = self.processes.summed(tally).tolist()
        if any(flags):
            rank, index = divmod(next(i for i, flag in enumerate(flags) if flag), len(done))
            self._stop_at([done[index]], "The loss is not finite", rank)
        return loss / max(weight, 1.0), weight, int(tokens)

    def _divide_gradients(self, weight: float) -> Tensor:
        """From sums over positions to their mean, at most as long as ``clip`` says. Returns the length before."""
        factor = self.processes.world_size / max(weight, 1.0)  # several processes have left the mean of their sums
        parameters = [parameter for parameter in self.head.parameters() if parameter.grad is not None]
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
        clip = self.config.optim.clip or float("inf")
        return whole(nn.utils.clip_grad_norm_(parameters, clip))

    def _stop_at(self, done: Sequence[Trained], what: str, rank: int | None = None) -> None:
        """The step is not taken: the head stays as it was before it."""
        self.optimizer.zero_grad(set_to_none=True)
        first, last = done[0].place, done[-1].place
        of = f"batch {first.batch}" if first == last else f"batches {first.batch} to {last.batch}"
        who = f" of process {rank}" if rank is not None and self.processes.world_size > 1 else ""
        raise NotFiniteError(
            f"{what} in step {self.progress.step + 1}",
            got=f"epoch {first.epoch}, {of}{who}",
            next_step="Lower optim.lr or optim.clip (0 is off), or set run.dtype to float32.",
        )

    def validation_loss(self, batches: Sequence[Sequence[Example]]) -> tuple[float, dict[str, float]]:
        """Mean loss and parts over texts that are not trained on. Every process runs all of them."""
        self.head.eval()
        found = []
        with torch.no_grad():
            for examples in batches:
                batch = Batch.of(examples, self.device)
                signals = self._source.signals(batch)
                with self.autocast():
                    found.append(_detached(self.module(batch, signals)))
        self.head.train()
        weights = [float(losses.weight) for losses in found]
        total = sum(float(losses.total) * weight for losses, weight in zip(found, weights, strict=True) if weight)
        return total / max(sum(weights), 1.0), mean_parts(found)

    def autocast(self) -> AbstractContextManager[Any]:
        half = self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype if half else None, enabled=half)

    def kept_head(self) -> HeadModule:
        """A copy on the host of what validates and is kept: the running mean where there is one."""
        return whole_head(self.head, self._means())

    # -- stopping and going on ---------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        states = gather_objects(random_state(), self.processes)
        return Snapshot.of(self.head, self.optimizer, self._means(), self.progress, states)

    def restore(self, snapshot: Snapshot) -> None:
        self.progress = snapshot.restore(self.head, self.optimizer, self._means())
        states = snapshot.state["random"]
        if len(states) != self.processes.world_size:
            raise OptionError(
                "The run was started with another number of processes",
                got=self.processes.world_size,
                allowed=len(states),
                next_step="Use as many, or start a new run with head.start.",
            )
        set_random_state(states[self.processes.rank])
        self._stream = self._stream_from(self.progress.place)

    def _means(self) -> list[Tensor] | None:
        return None if self.mean is None else self.mean.values

    def _stream_from(self, place: Place) -> Stream:
        run = self.config.run
        return Stream(self._texts, run.max_tokens, run.seed, self.processes, place)


class TargetClock:
    """How long the target takes. On a GPU marks in its queue are read when the step is over, so that nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._marks: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        if not self._on_gpu:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._marks.append((begin, end))

    def taken(self) -> float:
        """Seconds since the last time it was asked."""
        for begin, end in self._marks:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000.0
        self._marks.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def compute_dtype(asked: str, device: torch.device) -> torch.dtype:
    if asked == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if asked == "bfloat16" else torch.float32


def mean_parts(found: Sequence[Losses]) -> dict[str, float]:
    """Of every part the mean over the batches that have it, by the positions that count."""
    sums: dict[str, tuple[float, float]] = {}
    for losses in found:
        weight = float(losses.weight)
        for name, value in losses.parts.items():
            total, over = sums.get(name, (0.0, 0.0))
            sums[name] = (total + float(value) * weight, over + weight) if weight else (total, over)
    return {name: total / over for name, (total, over) in sums.items() if over}


def _detached(losses: Losses) -> Losses:
    parts = {name: torch.as_tensor(value).detach() for name, value in losses.parts.items()}
    return Losses(losses.total.detach(), parts, losses.weight.detach())
