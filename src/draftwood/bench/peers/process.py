"""A running peer: a worker process that handles one request per line and sleeps in between."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch

from draftwood.bench.peers.environments import clean_environment, explain_absence, find_python
from draftwood.bench.peers.messages import PeerModel, PeerResult, decode_result, encode_request
from draftwood.bench.peers.specs import PeerSpec
from draftwood.config import SamplingParams
from draftwood.errors import DraftwoodError
from draftwood.models import resolve
from draftwood.progress import Progress, report

LOAD_SECONDS = 900.0  # generous: slow disks, and some engines compile first
ANSWER_SECONDS, TOKEN_SECONDS = 180.0, 5.0
CLOSE_SECONDS = 10.0
_LOG_LINES, _LOG_BYTES, _SHOWN = 8, 8192, 200


class Peer:
    """An engine in its own process, with the model loaded. Close it, or use it in a ``with`` statement."""

    def __init__(
        self,
        spec: PeerSpec,
        request: PeerModel,
        progress: Progress | None = None,
        *,
        load_seconds: float = LOAD_SECONDS,
    ) -> None:
        self.spec = spec
        self._seed = request.seed
        self._count = 0
        self._process: subprocess.Popen[bytes] | None = None
        why = explain_absence(spec, request)
        if why is not None:
            raise DraftwoodError(why)
        message = _load_message(spec, request, progress)
        report(progress, f"starting {spec.name}", 0, 1)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process runs
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._start(find_python(spec), message["threads"])
        try:
            self.facts = self._ask(message, load_seconds)  # version and dtype
        except BaseException:  # the caller gets no object to close
            self._kill()
            raise
        report(progress, f"starting {spec.name}", 1, 1)

    def generate(self, prompt_ids: list[int], params: SamplingParams) -> PeerResult:
        """Generate one sample."""
        message = {"op": "generate", **encode_request(prompt_ids, params, self._seed)}
        content = self._ask(message, ANSWER_SECONDS + TOKEN_SECONDS * params.max_tokens)
        try:
            return decode_result(content, len(prompt_ids))
        except (KeyError, TypeError, ValueError) as error:
            self._kill()
            raise self._error("sent an invalid reply", f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Stop the process. Idempotent."""
        try:
            if self._process is not None:
                with contextlib.suppress(OSError):
                    self._pipe(self._process.stdin).close()  # the worker exits at the end of its input
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(CLOSE_SECONDS)
        finally:
            self._kill()
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, python: Path | None, threads: int) -> None:
        try:
            self._process = subprocess.Popen(
                [str(python), str(self.spec.worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=_environment(threads),
                start_new_session=True,  # Ctrl-C goes to this process only; the worker exits when its input ends
            )
        except OSError as error:
            raise self._error("cannot be started", error) from error
        output = self._pipe(self._process.stdout)
        threading.Thread(target=_read_lines, args=(output, self._lines), daemon=True).start()

    def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send one line and wait for the reply. A worker that does not reply is killed."""
        if self._process is None:
            raise self._error("is closed", None)
        self._count += 1
        try:
            pipe = self._pipe(self._process.stdin)
            pipe.write(json.dumps({"id": self._count, **message}).encode() + b"\n")
            pipe.flush()
            line = self._lines.get(timeout=seconds)
        except OSError:  # the worker closed its input
            line = None
        except queue.Empty:
            self._kill()
            raise self._error(f"did not reply within {seconds:.0f} seconds", self._read_log()) from None
        except BaseException:  # Ctrl-C: the reply would be taken for that of the next request
            self._kill()
            raise
        if line is None:
            raise self._describe_exit()
        return self._parse_reply(line)

    def _parse_reply(self, line: bytes) -> dict[str, Any]:
        try:
            content = json.loads(line)
            if not isinstance(content, dict) or content.pop("id", None) != self._count:
                raise ValueError
        except ValueError as error:
            self._kill()
            raise self._error("sent an invalid reply", repr(line[:_SHOWN].decode(errors="replace"))) from error
        if "error" in content:
            raise self._error("failed", content["error"])
        return content

    def _describe_exit(self) -> DraftwoodError:
        """Describe how the worker ended, with the end of its log."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        code = self._process.returncode
        self._kill()
        how = "closed its output" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            how = signal.strsignal(-code) or f"signal {-code}"
        return self._error("exited without a reply", "\n".join(filter(None, [how, self._read_log()])))

    def _error(self, what: str, got: object) -> DraftwoodError:
        return DraftwoodError(f"The peer {self.spec.name} {what}", got=got)

    def _read_log(self) -> str:
        """Read the last lines of the log."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_BYTES))
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join([line[:_SHOWN] for line in lines if line.strip()][-_LOG_LINES:])

    def _kill(self) -> None:
        """Kill the process and its children."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            self._pipe(process.stdin).close()

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe


def _load_message(spec: PeerSpec, request: PeerModel, progress: Progress | None) -> dict[str, Any]:
    assistant = request.assistant
    if assistant is None and spec.options.get("model"):
        assistant = resolve(str(spec.options["model"]), progress).path
    dtype = spec.options.get("dtype", "auto")
    return {
        "op": "load",
        "variant": spec.name.partition(":")[2],
        "options": dict(spec.options),
        "folder": str(request.folder),
        "gguf": None if request.gguf is None else str(request.gguf),
        "dtype": request.dtype if dtype == "auto" else dtype,
        "dtype_is_free": dtype == "auto",
        "device": request.device,
        "threads": request.threads or torch.get_num_threads(),
        "max_context": request.max_context,
        "assistant": None if assistant is None else str(assistant),
        "seed": request.seed,
    }


def _environment(threads: int) -> dict[str, str]:
    """Environment of a worker whose idle threads soon sleep."""
    kept = {name: value for name, value in clean_environment().items() if name != "OMP_WAIT_POLICY"}
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    # vLLM's n-gram method starts numba, which sets the number of threads of torch to its own.
    counts = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), str(threads))
    return {**kept, **quiet, **counts, "KMP_BLOCKTIME": "1"}


def _read_lines(pipe: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    """Copy lines to a queue, in a thread: reading a pipe with a timeout is not portable."""
    with pipe:
        for line in pipe:
            lines.put(line)
    lines.put(None)
