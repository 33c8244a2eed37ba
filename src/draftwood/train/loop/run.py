"""A whole training run: its folder, the loop, validation and checkpoints.

RUN/config.toml      the resolved configuration
RUN/log.jsonl        one line per step and validation
RUN/checkpoints/     recent checkpoints; --resume continues from the last one
RUN/best/            the head with the best validation score_validation
RUN/head/            the final head
RUN/course.svg       loss and tau over the steps
RUN/tensorboard/     the log for TensorBoard, if it is installed
"""

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from draftwood.disk import check_output, new_file, read_toml
from draftwood.display import duration, readable_size
from draftwood.errors import OptionError
from draftwood.heads import save_head
from draftwood.train.base import Example
from draftwood.train.config import CONFIGURATION, TrainConfig, write_toml
from draftwood.train.loop.checkpoint import Checkpoints
from draftwood.train.loop.distributed import Processes
from draftwood.train.loop.logs import Board, Console, Log, read_log
from draftwood.train.loop.plan import signal_bytes
from draftwood.train.loop.setup import Setup, check_method, make_signal_source, prepare
from draftwood.train.loop.trainer import NotFiniteError, StepResult, Trainer
from draftwood.train.measure import plot_log, score_validation, validate_head

SMOOTHING = 0.95  # of the step time, for the estimate of the remaining time

# Options that may change when a run resumes, since they do not change the losses.
_CHANGEABLE = {
    "model": ("device",),
    "run": ("log_every", "checkpoint_every", "validate_every", "keep", "tensorboard", "out"),
    "validate": None,  # all of it
}
# Further options that may change after a loss that is not finite. Cached hidden states depend on the dtype.
_REMEDIES = {"optim": ("lr", "clip"), "run": ("dtype", "cache_signals")}


class StopRequest:
    """Whether the run was requested to stop by SIGINT (Ctrl-C) or SIGTERM."""

    def __init__(self, console: Console) -> None:
        self.requested = False
        self._console = console

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle signals inside the block. The first one stops after the step, the second one at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(each, self._handle) for each in signals]
        try:
            yield
        finally:
            for each, handler in zip(signals, before, strict=True):
                signal.signal(each, handler)

    def _handle(self, *_: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._console.note_unbuffered("stopping after the current step; press Ctrl-C again to stop at once")


def train_head(
    config: TrainConfig, *, resume: bool = False, processes: Processes | None = None, console: Console | None = None
) -> Path:
    """Train a head and return the run's folder. Ctrl-C writes a checkpoint, then raises KeyboardInterrupt."""
    processes = processes or Processes()
    console = console or Console(quiet=not processes.is_first)
    check_method(config)
    folder = Path(config.run.out).expanduser()
    checkpoints = Checkpoints(folder, config.run.keep)
    if processes.is_first:
        _check_folder(folder, config, checkpoints, resume=resume)
    setup = prepare(config, processes, console.progress)
    run = Run(config, setup, folder, checkpoints, processes, console)
    run.start(resume=resume)
    return run.train()


class Run:
    def __init__(
        self,
        config: TrainConfig,
        setup: Setup,
        folder: Path,
        checkpoints: Checkpoints,
        processes: Processes,
        console: Console,
    ) -> None:
        self.config, self.setup, self.folder = config, setup, folder
        self.checkpoints, self.processes, self.console = checkpoints, processes, console
        if config.run.cache_signals:
            size = readable_size(signal_bytes(setup.head.config, setup.target.info.dtype, setup.texts))
            console.note(f"hidden states of the target: {size} in {config.run.cache_signals}")
        groups = setup.texts.batches(config.run.max_tokens)
        setup.method.prepare([setup.texts.examples(group) for group in groups], console.progress)
        source = make_signal_source(config, setup, processes, console.progress)
        self.trainer = Trainer(config, setup.method, setup.texts, source, setup.num_steps, processes)
        self._log: Log | None = None
        self._board: Board | None = None
        self._step_time = 0.0  # seconds, smoothed
        self._saved_step = 0  # step of the last checkpoint

    def start(self, *, resume: bool) -> None:
        """Open the logs, and restore the last checkpoint if the run resumes."""
        steps = self.checkpoints.steps() if resume else []
        if steps:
            snapshot = self.checkpoints.load(steps[-1])
            with self.checkpoints.explain_damage(steps[-1]):
                self.trainer.restore(snapshot)
            self._saved_step = steps[-1]
            self.console.note(f"continuing from step {steps[-1]}")
        if self.processes.is_first:
            self._board = Board(self.config.run.tensorboard, self.folder / "tensorboard")
            with new_file(self.folder / "config.toml") as path:  # only now, so that a refused run leaves no files
                path.write_text(write_toml(self.config.tables()), encoding="utf-8")
            self._log = Log(self.folder / "log.jsonl", self.trainer.progress.step)
        if self.setup.coverage < 1.0:
            self.console.note(f"the draft vocabulary covers {self.setup.coverage:.2%} of the generated tokens")

    def train(self) -> Path:
        """Run the remaining steps, then save the head. Return the folder."""
        progress, stop = self.trainer.progress, StopRequest(self.console)
        with stop.handle_signals():
            self._validate_if_due()  # if the run stopped before its validation
            while not self.trainer.is_done:
                self._report_step(self._step())
                is_last = self.trainer.is_done
                stopping = self._any_process(stop.requested)
                if is_last or stopping or progress.step % self.config.run.checkpoint_every == 0:
                    self._checkpoint()  # before validation, which may fail
                if is_last or not stopping:
                    self._validate_if_due()
                if stopping and not is_last:
                    self.console.note(f"stopped after step {progress.step}; continue with --resume")
                    raise KeyboardInterrupt
        self._finish()
        return self.folder

    def _step(self) -> StepResult:
        try:
            return self.trainer.step()
        except NotFiniteError as error:
            if self._log is not None:
                self._log.add("stop", {"step": self.trainer.progress.step + 1, "why": error.what})
            kept = self._saved_step
            then = f"continue from step {kept}" if kept else "start again (there is no checkpoint yet)"
            advice = f"{error.next_step} Then {then} with --resume."
            raise NotFiniteError(error.what, got=error.got, next_step=advice) from error

    def _any_process(self, requested: bool) -> bool:
        """Return whether any process was requested to stop, so that all stop after the same step."""
        flag = torch.tensor([float(requested)], device=self.trainer.device)
        return bool(self.processes.all_reduce(flag).item())

    def _report_step(self, result: StepResult) -> None:
        values: dict[str, Any] = {**asdict(result), "parts": dict(result.parts)}
        values["tokens_per_second"] = result.tokens / max(result.seconds, 1e-9)
        self._record("train", values)
        self._step_time = (
            SMOOTHING * self._step_time + (1 - SMOOTHING) * result.seconds if self._step_time else result.seconds
        )
        num_steps = self.trainer.num_steps
        shown = {**values, "steps": num_steps, "left": self._step_time * (num_steps - result.step)}
        due = result.step % self.config.run.log_every == 0 or result.step in (1, num_steps)
        self.console.step(shown, transient=not due)

    def _validate_if_due(self) -> None:
        progress, every = self.trainer.progress, self.config.run.validate_every
        due = self.trainer.is_done or (every and progress.step % every == 0)
        if not due or progress.validated == progress.step:
            return
        self._validate()
        progress.validated = progress.step
        if self._saved_step == progress.step:
            self._checkpoint()  # again, with the score_validation

    def _validate(self) -> None:
        texts = [self.setup.held_out[index] for index in range(len(self.setup.held_out))]
        if not texts:
            return
        trainer, section = self.trainer, self.config.validate
        if trainer.mean is None:
            loss, parts = trainer.validation_loss(self._validation_batches(texts))
        else:
            with trainer.mean.applied():
                loss, parts = trainer.validation_loss(self._validation_batches(texts))
        head = trainer.copy_head()  # collective
        best = [trainer.progress.best]
        if self.processes.is_first:
            result: dict[str, Any] = {"step": trainer.progress.step, "loss": loss, "parts": parts}
            mixed = self.setup.held_out.shuffled(self.config.run.seed)
            result |= validate_head(head, self.setup.target, self.setup.codec, mixed, section, self.console.progress)
            self._record("validate", result)
            self.console.note(format_validation(result))
            if best[0] is None or score_validation(result) > best[0]:
                best[0] = score_validation(result)
                self.checkpoints.save_best(head)
        self.processes.wait()
        trainer.progress.best = best[0]  # only the first process saves it

    def _validation_batches(self, texts: Sequence[Example]) -> list[list[Example]]:
        groups = self.setup.held_out.batches(self.config.run.max_tokens, seed=self.config.run.seed)
        chosen: list[list[Example]] = []
        left = self.config.validate.texts
        for group in groups:
            if left > 0:
                chosen.append([texts[index] for index in group[:left]])
                left -= len(chosen[-1])
        return chosen

    def _checkpoint(self) -> None:
        snapshot = self.trainer.snapshot()  # collective
        if self.processes.is_first:
            self.checkpoints.save(self.trainer.progress.step, snapshot)
        self._saved_step = self.trainer.progress.step
        self.processes.wait()

    def _finish(self) -> None:
        head = self.trainer.copy_head()
        if not self.processes.is_first:
            return
        save_head(head, self.folder / "head", force=True)
        lines = read_log(self.folder / "log.jsonl")
        with new_file(self.folder / "course.svg") as path:
            path.write_text(plot_log(lines, f"{self.config.method.name}: {self.folder.name}"), encoding="utf-8")
        trained = [line for line in lines if line["kind"] == "train"]
        seconds, target = (sum(line[name] for line in trained) for name in ("seconds", "target_seconds"))
        tokens = sum(line["tokens"] for line in trained)
        self.console.note(
            f"{self.folder / 'head'}: {self.trainer.progress.step} steps in {duration(seconds)}, "
            f"{tokens / max(seconds, 1e-9):,.0f} tokens/s, {target / max(seconds, 1e-9):.0%} of the time in the target"
        )

    def _record(self, kind: str, values: dict[str, Any]) -> None:
        if self._log is not None and self._board is not None:
            self._log.add(kind, values)
            self._board.add(kind, values)


def format_validation(result: dict[str, Any]) -> str:
    """Summarise a validation in one line."""
    parts = [f"step {result['step']}, held out: loss {result['loss']:.4f}"]
    if "trees" in result:
        parts.append("tau " + ", ".join(f"{name} {each['tau']:.3f}" for name, each in result["trees"].items()))
    if "accuracy" in result:
        parts.append(f"accuracy {result['accuracy']:.3f}")
    if result.get("ranks"):  # empty for a head that predicts one token
        below = " ".join(f"{each['accuracy']:.2f}" for each in result["ranks"])
        errors = " ".join(f"{each['ece']:.2f}" for each in result["ranks"])
        parts.append(f"below rank 1 to {len(result['ranks'])}: accuracy {below}, calibration error {errors}")
    return " · ".join(parts)


def _check_folder(folder: Path, config: TrainConfig, checkpoints: Checkpoints, *, resume: bool) -> None:
    """Raise an error if the folder has another run or is not writable."""
    path = folder / "config.toml"
    if path.exists() and not resume:
        raise OptionError(
            f"{folder} already has a run",
            got=f"checkpoints of steps {checkpoints.steps()}" if checkpoints.steps() else "no checkpoint yet",
            next_step="Continue it with --resume, or set run.out to another folder.",
        )
    if path.exists() and checkpoints.steps():
        last = read_log(folder / "log.jsonl")[-1:]
        remedies = _REMEDIES if [line.get("kind") for line in last] == ["stop"] else {}
        _check_unchanged(read_toml(path, CONFIGURATION), config.tables(), remedies)
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        check_output(path, force=True)
    finally:
        for place in missing:
            with suppress(OSError):
                place.rmdir()


def _check_unchanged(before: dict[str, Any], now: dict[str, Any], remedies: Mapping[str, tuple[str, ...]]) -> None:
    before = TrainConfig.of(before).tables()
    changed = []
    for section, table in now.items():
        free = _CHANGEABLE.get(section, ())
        if free is None:
            continue
        for key in sorted({*table, *before[section]} - {*free, *remedies.get(section, ())}):
            if table.get(key) != before[section].get(key):
                changed.append(f"{section}.{key} = {table.get(key)}, was {before[section].get(key)}")
    if changed:
        raise OptionError(
            "The run was started with another configuration",
            got="; ".join(changed),
            next_step="Restore these values, or start a new run with head.start set to its head.",
        )
