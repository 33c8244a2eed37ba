"""Runs Draftwood commands in sequence or in parallel, each with a log; finished steps are skipped."""

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
PATIENCE = 120.0  # seconds for a stopped process to save its results
SHOWN = 160  # characters of a log's last line


class Step(NamedTuple):
    name: str
    words: tuple[str, ...]  # arguments of ``draftwood``
    result: Path = Path()  # a file that exists once the step is finished
    again: tuple[str, ...] = ()  # further arguments to resume
    codes: tuple[int, ...] = (0,)  # exit codes of success
    prints_result: bool = False  # stdout is written to the result file

    def is_done(self, logs: Path) -> bool:
        """Raise if the result is from another command."""
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
    """A running step, in its own session, so that Ctrl-C is forwarded only once."""

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
                    preexec_fn=_heed_interruptions,
                )

    def finish(self) -> str:
        """Mark the step as finished and describe how it ended."""
        step, seconds = self.step, time.perf_counter() - self._began
        if self.running.returncode not in step.codes or not (self._printed or step.result).is_file():
            raise DraftwoodError(
                f"{step.name} failed with exit code {self.running.returncode}",
                got=self._last_words(),
                next_step=f"See {self.log}. The same command resumes here.",
            )
        if self._printed:
            self._printed.replace(step.result)
        write_json(self._note, {"words": step.words, "seconds": round(seconds, 1)})
        trouble = f", exit code {self.running.returncode}: see its log" if self.running.returncode else ""
        return f"{step.name}: {duration(seconds)}{trouble} · {self._last_words()}"

    def _last_words(self) -> str:
        """Return the last informative line of the log."""
        _, *lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line.strip() for line in lines if " " in line.strip()]
        return told[-1][:SHOWN] if told else "nothing to tell"


def run_steps(steps: Iterable[Step], logs: Path, jobs: int) -> None:
    """Run the steps. After a failure running steps finish and no other starts; an interruption stops all."""
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
    finally:  # not empty only after an interruption
        stop(processes)
    if failure is not None:
        raise failure


def _ended(processes: list[Process]) -> Iterator[Process]:
    """Remove and return the finished processes."""
    for process in [each for each in processes if each.running.poll() is not None]:
        processes.remove(process)
        yield process


def _heed_interruptions() -> None:
    """A shell lets what it starts in the background ignore SIGINT, and processes inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop(processes: Iterable[Process]) -> None:
    """Send SIGINT, so that commands save their results; kill after a timeout or a second interruption."""
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
    """Divide the cores between parallel processes."""
    found = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if jobs > 1:
        found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    return found
