"""Turns messages into a prompt with the chat template of a model, in a bounded time.

Templates are programs of strangers, so a process of its own renders them (``template_worker.py``). It starts with the
first chat, is used again by the next ones, and ends with this process.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwood.errors import PromptError

Message = Mapping[str, Any]  # "role" and "content", which are texts; more for calls of tools
Tool = Mapping[str, Any]  # {"type": "function", "function": {...}}

MAX_SECONDS = 20.0  # real templates take milliseconds, but the machine may be busy
WORKER = Path(__file__).with_name("template_worker.py")


def render_chat(
    template: str,
    messages: Sequence[Message],
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
    tools: Sequence[Tool] | None = None,
) -> str:
    """Renders the prompt of these messages. ``special_tokens``: ``bos_token``, ``eos_token`` and so on."""
    result = _WORKER.run(
        {
            "template": template,
            "messages": check_messages(messages),
            "special_tokens": dict(special_tokens),
            "add_generation_prompt": add_generation_prompt,
            "tools": tools and list(tools),
        }
    )
    if "refused" in result:
        raise PromptError("The chat template of the model rejects these messages", got=result["refused"])
    if "failed" in result:
        raise PromptError(
            "The chat template of the model failed",
            got=result["failed"],
            next_step="Check the messages, or generate from a plain prompt instead.",
        )
    return result["text"]


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns the messages as dictionaries; an invalid message is refused by its index."""
    shape = "a list of {'role': 'user', 'content': '...'}"
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise PromptError("A chat needs a list of messages", got=repr(messages)[:80], allowed=shape)
    if not messages:
        raise PromptError("A chat needs at least one message", got="none", allowed=shape)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(f"Message {index} must be an object with 'role' and 'content'", got=repr(message)[:80])
        for field in ("role", "content"):
            value = message.get(field)
            if not isinstance(value, str):
                given = "nothing" if field not in message else repr(value)[:80]
                raise PromptError(f"Message {index} needs a text as its {field}", got=given, allowed=shape)
        if not message["role"]:
            raise PromptError(f"Message {index} has an empty role", allowed=shape)
    return [dict(message) for message in messages]


class _Worker:
    """The process that renders templates. One order at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # id of the process that started it: a fork must not share its pipes

    def run(self, order: Mapping[str, Any]) -> dict[str, str]:
        with self._lock:
            process = self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(MAX_SECONDS, process.kill)
            timer.daemon = True
            timer.start()
            line = b""
            try:
                process.stdin.write(json.dumps(order, default=str).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                pass
            finally:
                timer.cancel()
                if not line.endswith(b"\n"):  # it was killed, or we were interrupted
                    self._stop()
        if not line.endswith(b"\n"):
            raise PromptError(
                "The chat template of the model was stopped",
                got=f"more than {MAX_SECONDS:g} seconds, or more memory than it may use",
                next_step="Check the template, or generate from a plain prompt instead.",
            )
        result: dict[str, str] = json.loads(line)
        return result

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self._owner = os.getpid()
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is not for it
            )
            atexit.register(self._stop)
        return self._process

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()


_WORKER = _Worker()
