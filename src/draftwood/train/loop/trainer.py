"""The training loop. Read `Trainer.step` first: it is one whole optimiser step.

The loss of a micro-batch is a mean over its counted positions. The loss of a step is the mean over the counted
positions of all micro-batches of all processes. Gradients are therefore summed with the number of counted positions as
weights and divided by the total at the end.
"""

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
from draftwood.train.loop.checkpoint import Place, Progress, Snapshot, gather_head, get_random_state, set_random_state
from draftwood.train.loop.distributed import Processes, gather_objects, gather_tensor, share_module, sync_gradients
from draftwood.train.loop.schedule import MovingAverage, learning_rate, make_optimizer
from draftwood.train.methods import Method

INITIAL_NUM_STEPS = 1000  # of a run limited by time, before a step has been timed


class Texts(Protocol):
    """Training texts: `train.data.TrainingData` or anything with the same batches."""

    def __getitem__(self, index: int) -> Example: ...

    def batches(
        self, max_tokens: int, *, seed: int = 0, epoch: int = 0, rank: int = 0, world_size: int = 1, start: int = 0
    ) -> Sequence[Sequence[int]]:
        """Return indices of examples per batch, without the first ``start`` batches of this process."""


class SignalSource(Protocol):
    """Source of the target's hidden states: the target itself, or states stored on disk."""

    def signals(self, batch: Batch) -> Signals: ...


class NotFiniteError(DraftwoodError):
    """A loss or its gradients are not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    step: int  # number of completed steps
    loss: float
    parts: Mapping[str, float]  # in this process
    weight: float  # counted positions
    lr: float
    gradient_norm: float
    tokens: int  # over all processes
    seconds: float
    target_seconds: float  # part of it spent in the target


class Stream:
    """Micro-batches of one process over all epochs."""

    def __init__(self, texts: Texts, max_tokens: int, seed: int, processes: Processes, place: Place) -> None:
        self._texts, self._max_tokens, self._seed, self._processes = texts, max_tokens, seed, processes
        self.place = place
        self._left = self._batches_from(place)

    def take(self) -> tuple[Place, list[Example]]:
        """Return the next micro-batch and its position."""
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
                "There are too few texts to train on",
                got=f"fewer batches than processes ({self._processes.world_size})",
                next_step="Make more data, hold out fewer texts, or lower run.max_tokens.",
            )
        return found


class LossModule(nn.Module):
    """A method as a module whose forward can be distributed."""

    def __init__(self, method: Method, *, shared: bool = False) -> None:
        super().__init__()
        self.head = method.head
        self._method = method
        self._shared = shared

    def forward(self, batch: Batch, signals: Signals) -> Losses:
        losses = self._method.losses(batch, signals)
        if not self._shared:
            return losses
        # Distributed training expects a gradient of every parameter, even of those that a batch did not use.
        nothing = torch.stack([parameter.sum() for parameter in self.head.parameters()]).sum() * 0.0
        return losses._replace(total=losses.total + nothing)


class MicroBatch(NamedTuple):
    """A micro-batch after its backward pass."""

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
                "optim.minutes works with one process only",
                got=f"{self.processes.world_size} processes",
                next_step="Set optim.steps or optim.epochs.",
            )
        self.progress = Progress()
        self.device = next(self.head.parameters()).device
        self._texts = texts
        self._source = source
        self.dtype = choose_dtype(config.run.dtype, self.device)
        method.checkpoints = config.run.checkpointing
        self.module = share_module(
            LossModule(method, shared=self.processes.world_size > 1), config.run.strategy, self.processes
        )
        self.optimizer = make_optimizer(config.optim, self.head)
        self.mean = MovingAverage(self.head.parameters(), config.optim.ema) if config.optim.ema else None
        self._clock = TargetClock(self.device)
        self._stream = self._open_stream(Place())

    @property
    def num_steps(self) -> int:
        """Steps of the whole run; estimated if the run is limited by time."""
        progress, limit = self.progress, 60.0 * self.config.optim.minutes
        if not limit:
            return self._num_steps
        if progress.seconds >= limit:
            return progress.step
        return (
            max(progress.step + 1, round(progress.step * limit / progress.seconds))
            if progress.step
            else INITIAL_NUM_STEPS
        )

    @property
    def is_done(self) -> bool:
        return self.progress.step >= self.num_steps

    def step(self) -> StepResult:
        """Run one optimiser step over ``accumulate`` micro-batches per process."""
        started, optim, step = time.perf_counter(), self.config.optim, self.progress.step
        self.head.train()
        num_steps = self.num_steps
        self.method.begin_step(step, num_steps)
        self.optimizer.zero_grad(set_to_none=True)
        done = [self._backward(last=index == optim.accumulate - 1) for index in range(optim.accumulate)]
        loss, weight, tokens = self._reduce(done)
        norm = self._divide_gradients(weight)
        if not torch.isfinite(norm):
            self._raise_not_finite(done, "The gradients are not finite")
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
            parts=average_parts([each.losses for each in done]),
            weight=weight,
            lr=rate,
            gradient_norm=float(norm),
            tokens=tokens,
            seconds=time.perf_counter() - started,
            target_seconds=self._clock.read(),
        )
        self.progress.seconds += result.seconds
        return result

    def _backward(self, *, last: bool) -> MicroBatch:
        place, examples = self._stream.take()
        batch = Batch.of(examples, self.device)
        with self._clock.measure():
            signals = self._source.signals(batch)
        with sync_gradients(self.module, last):
            with self.autocast():
                losses: Losses = self.module(batch, signals)
            (losses.total * losses.weight).backward()  # type: ignore[no-untyped-call]
        return MicroBatch(place, _detach(losses), sum(len(example.token_ids) for example in examples))

    def _reduce(self, done: Sequence[MicroBatch]) -> tuple[float, float, int]:
        """Return loss, counted positions and tokens over all processes. Synchronises with the device."""
        totals = torch.stack([each.losses.total.double() for each in done])  # [A]
        weights = torch.stack([each.losses.weight.double() for each in done])  # [A]
        tokens = float(sum(each.tokens for each in done))
        bad = torch.zeros(self.processes.world_size, len(done), dtype=torch.float64, device=self.device)
        bad[self.processes.rank] = (~torch.isfinite(totals)).double()
        numbers = torch.cat([torch.stack([(totals * weights).sum(), weights.sum()]), bad.flatten()])
        tally = torch.cat([numbers, numbers.new_tensor([tokens])])
        loss, weight, *flags, tokens = self.processes.all_reduce(tally).tolist()
        if any(flags):
            rank, index = divmod(next(i for i, flag in enumerate(flags) if flag), len(done))
            self._raise_not_finite([done[index]], "The loss is not finite", rank)
        return loss / max(weight, 1.0), weight, int(tokens)

    def _divide_gradients(self, weight: float) -> Tensor:
        """Turn sums over positions into means, and clip them. Return the norm before clipping."""
        factor = self.processes.world_size / max(weight, 1.0)  # DDP and FSDP average the sums of the processes
        parameters = [parameter for parameter in self.head.parameters() if parameter.grad is not None]
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
        clip = self.config.optim.clip or float("inf")
        return gather_tensor(nn.utils.clip_grad_norm_(parameters, clip))

    def _raise_not_finite(self, done: Sequence[MicroBatch], what: str, rank: int | None = None) -> None:
        """Raise an error without applying the step: the head stays unchanged."""
        self.optimizer.zero_grad(set_to_none=True)
        first, last = done[0].place, done[-1].place
        of = f"batch {first.batch}" if first == last else f"batches {first.batch} to {last.batch}"
        who = f" of process {rank}" if rank is not None and self.processes.world_size > 1 else ""
        raise NotFiniteError(
            f"{what} in step {self.progress.step + 1}",
            got=f"epoch {first.epoch}, {of}{who}",
            next_step="Lower optim.lr or optim.clip (0 disables clipping), or set run.dtype to float32.",
        )

    def validation_loss(self, batches: Sequence[Sequence[Example]]) -> tuple[float, dict[str, float]]:
        """Return the mean loss and its parts over held-out texts. Every process runs all of them."""
        self.head.eval()
        found = []
        with torch.no_grad():
            for examples in batches:
                batch = Batch.of(examples, self.device)
                signals = self._source.signals(batch)
                with self.autocast():
                    found.append(_detach(self.module(batch, signals)))
        self.head.train()
        weights = [float(losses.weight) for losses in found]
        total = sum(float(losses.total) * weight for losses, weight in zip(found, weights, strict=True) if weight)
        return total / max(sum(weights), 1.0), average_parts(found)

    def autocast(self) -> AbstractContextManager[Any]:
        half = self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype if half else None, enabled=half)

    def copy_head(self) -> HeadModule:
        """Return a CPU copy of the head to validate and save: the moving average if there is one."""
        return gather_head(self.head, self._average_values())

    def snapshot(self) -> Snapshot:
        states = gather_objects(get_random_state(), self.processes)
        return Snapshot.of(self.head, self.optimizer, self._average_values(), self.progress, states)

    def restore(self, snapshot: Snapshot) -> None:
        self.progress = snapshot.restore(self.head, self.optimizer, self._average_values())
        states = snapshot.state["random"]
        if len(states) != self.processes.world_size:
            raise OptionError(
                "The run was started with another number of processes",
                got=self.processes.world_size,
                allowed=len(states),
                next_step="Use the same number, or start a new run with head.start.",
            )
        set_random_state(states[self.processes.rank])
        self._stream = self._open_stream(self.progress.place)

    def _average_values(self) -> list[Tensor] | None:
        return None if self.mean is None else self.mean.values

    def _open_stream(self, place: Place) -> Stream:
        run = self.config.run
        return Stream(self._texts, run.max_tokens, run.seed, self.processes, place)


class TargetClock:
    """Measures the time of the target. On a GPU it reads events after the step, so that nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        if not self._on_gpu:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def read(self) -> float:
        """Return the seconds since the last call."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000.0
        self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    if asked == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if asked == "bfloat16" else torch.float32


def average_parts(found: Sequence[Losses]) -> dict[str, float]:
    """Average each part over the batches that have it, weighted by counted positions."""
    sums: dict[str, tuple[float, float]] = {}
    for losses in found:
        weight = float(losses.weight)
        for name, value in losses.parts.items():
            total, over = sums.get(name, (0.0, 0.0))
            sums[name] = (total + float(value) * weight, over + weight) if weight else (total, over)
    return {name: total / over for name, (total, over) in sums.items() if over}


def _detach(losses: Losses) -> Losses:
    parts = {name: torch.as_tensor(value).detach() for name, value in losses.parts.items()}
    return Losses(losses.total.detach(), parts, losses.weight.detach())
