"""Draftwood commands one after the other or some at a time, each with a log; what is finished is not done again."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from draftwood.disk.files import write_json
from draftwood.display import duration
from draftwood.errors import DraftwoodError, OptionError

POLL_SECONDS = 0.2
PATIENCE = 120.0  # seconds that a process has to write down what it has when it is stopped
SHOWN = 160  # characters of a log's last line


class Step(NamedTuple):
    name: str
    words: tuple[str, ...]  # behind ``draftwood``
    result: Path = Path()  # a file that is there once it is finished
    again: tuple[str, ...] = ()  # further words where an earlier start has left something
    codes: tuple[int, ...] = (0,)  # with which it has ended well
    prints_result: bool = False  # the file is what it prints

    def is_done(self, logs: Path) -> bool:
        """Refuses a result that another command has left: it would pass for that of this one."""
        note = logs / f"{self.name}.done"
        if not note.is_file() or not self.result.is_file():
            return False
        before = json.loads(note.read_text(encoding="utf-8"))["words"]
        if before != list(self.words):
            raise OptionError(
                f"{self.name} was finished with other arguments",
                got=shlex.join(word for word in self.words if word not in before) or "fewer",
                allowed=shlex.join(word for word in before if word not in self.words) or "more",
                next_step=f"Give those again or another --out, or remove {note} and what it was about.",
            )
        return True

    def planned(self, logs: Path) -> str:
        is_there = f"# {self.name} is finished"
        return is_there if self.is_done(logs) else shlex.join(["draftwood", *self.words, *self.again])


class Process:
    """A step that runs, in a session of its own: Ctrl-C reaches it once, when we pass it on."""

    def __init__(self, step: Step, logs: Path, environment: Mapping[str, str]) -> None:
        self.step, self.log = step, logs / f"{step.name}.log"
        self._note = logs / f"{step.name}.done"
        self._printed = step.result.with_name(f"{step.result.name}.part") if step.prints_result else None
        self._began = time.perf_counter()
        command = ["-m", "draftwood", *step.words, *step.again]
        logs.mkdir(parents=True, exist_ok=True)
        step.result.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w", encoding="utf-8") as log:
            log.write(f"$ python {shlex.join(command)}\n")
            log.flush()
            with (self._printed or Path(os.devnull)).open("w") as printed:
                self.running = subprocess.Popen(
                    [sys.executable, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=printed if self._printed else log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )

    def finish(self) -> str:
        """A line about how it ended, and a note that it did."""
        step, seconds = self.step, time.perf_counter() - self._began
        if self.running.returncode not in step.codes or not (self._printed or step.result).is_file():
            raise DraftwoodError(
                f"{step.name} failed with exit code {self.running.returncode}",
                got=self._last_words(),
                next_step=f"See {self.log}. The same command goes on from here.",
            )
        if self._printed:
            self._printed.replace(step.result)
        write_json(self._note, {"words": step.words, "seconds": round(seconds, 1)})
        trouble = f", exit code {self.running.returncode}: see its log" if self.running.returncode else ""
        return f"{step.name}: {duration(seconds)}{trouble} · {self._last_words()}"

    def _last_words(self) -> str:
        """The last line of its log that is more than a path."""
        _, *lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line.strip() for line in lines if " " in line.strip()]
        return told[-1][:SHOWN] if told else "nothing to tell"


def run_steps(steps: Iterable[Step], logs: Path, jobs: int) -> None:
    """A step that fails lets those that run end, and no other begin. Interrupted, all are stopped."""
    waiting, processes = iter(steps), list[Process]()
    failure: DraftwoodError | None = None
    try:
        while True:
            while failure is None and len(processes) < jobs and (step := next(waiting, None)) is not None:
                if step.is_done(logs):
                    print(f"{step.name}: finished before", flush=True)
                else:
                    processes.append(Process(step, logs, _environment(jobs)))
            if not processes:
                break
            time.sleep(POLL_SECONDS)
            for process in _ended(processes):
                try:
                    print(process.finish(), flush=True)
                except DraftwoodError as error:
                    failure = failure or error
    finally:  # only an interruption leaves some
        stop(processes)
    if failure is not None:
        raise failure


def _ended(processes: list[Process]) -> Iterator[Process]:
    """Those that have, taken off the list."""
    for process in [each for each in processes if each.running.poll() is not None]:
        processes.remove(process)
        yield process


def stop(processes: Iterable[Process]) -> None:
    """As Ctrl-C does, which lets a command keep what it has; not as kindly after a while, or if that is interrupted."""
    running = [process.running for process in processes]
    if running:
        print(f"\nstopping {len(running)} process{'es' if running[1:] else ''}", file=sys.stderr, flush=True)
    until = time.monotonic() + PATIENCE
    for process in running:
        process.send_signal(signal.SIGINT)
    try:
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


def _environment(jobs: int) -> dict[str, str]:
    """Processes that run side by side share the cores instead of fighting for all of them."""
    found = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if jobs > 1:
        found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    return found
