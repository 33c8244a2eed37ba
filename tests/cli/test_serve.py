"""``draftwood serve`` on the command line."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwood.models import short_name
from tests.tools.cli import TINY, Command, _plain_environment, draftwood_command  # noqa: F401 - fixtures

pytest.importorskip("uvicorn")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_server_starts_and_stops(how: signal.Signals, tmp_path: Path) -> None:
    memory = tmp_path / "learned.memory"
    command = [sys.executable, "-m", "draftwood", "serve", *TINY, "--port", "0", "--name", "mine"]
    command += ["--memory", str(memory)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = ""
        while "Ctrl-C" not in told:
            line = process.stderr.readline()
            assert line, told
            told += line
        (url,) = re.findall(r"http://\S+/v1", told)
        body = {"model": "mine", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
        request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] <= 5
        process.send_signal(how)
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()
    assert memory.exists()


def test_a_served_file_has_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("models/some.model-1.gguf", "folder/config.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert short_name(str(tmp_path / "models" / "some.model-1.gguf")) == "some.model-1"
    assert short_name(f"{tmp_path}/folder/") == "folder"
    monkeypatch.chdir(tmp_path / "folder")
    assert short_name(".") == "folder"
    assert (short_name("smollm2"), short_name("org/name"), short_name("tiny")) == ("smollm2", "org/name", "tiny")


def test_what_the_server_says_is_what_clients_send(
    draftwood_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The announced name is the one of the API, whatever the folder in the cache is called."""
    served = []

    class Quiet:
        def __init__(self, _: object, options: Any, on_ready: Callable[[], None]) -> None:
            served.append(options)
            on_ready()

        def run(self, **_: object) -> None:
            pass

    monkeypatch.setattr("draftwood.serve.create_server", Quiet)
    monkeypatch.setattr("draftwood.cli.generation.serve.short_name", lambda _: "short")
    result = draftwood_command("serve", *TINY, "--port", "0", "--api-key", "a", "--api-key", "b", "--strict")
    assert result.err.splitlines()[-1].startswith("short, drafter")
    (options,) = served
    assert (options.names, options.api_keys, options.strict) == (("short",), ("a", "b"), True)
    assert (options.max_connections, options.max_connections_per_address) == (512, 256)


def test_port_in_use_is_reported(draftwood_command: Command) -> None:
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = draftwood_command("serve", *TINY, "--port", str(port))
    assert result.code == 2
    assert f"port {port}" in result.err
    assert "--port" in result.err


@pytest.mark.parametrize("option", [("--port", "70000"), ("--max-waiting", "-1"), ("--max-batch", "0")])
def test_out_of_range_numbers_are_refused(draftwood_command: Command, option: tuple[str, str]) -> None:
    result = draftwood_command("serve", *TINY, *option)
    assert result.code == 2
    assert option[1] in result.err


def test_empty_api_key_is_refused(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "empty" in draftwood_command("serve", *TINY, "--api-key", "").err
    monkeypatch.setenv("DRAFTWOOD_API_KEY", " ")
    assert draftwood_command("serve", *TINY).code == 2


def test_api_keys_of_a_file(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from draftwood.cli.generation.serve import _api_keys

    keys = tmp_path / "keys"
    keys.write_text("# of the team\none\n\n two \n")
    monkeypatch.setenv("DRAFTWOOD_API_KEY", "of the environment")
    assert _api_keys(["three"], str(keys)) == ("three", "one", "two")
    assert _api_keys([], str(keys)) == ("one", "two")
    assert _api_keys([], None) == ("of the environment",)
    keys.write_text("# nothing\n")
    for file in (keys, tmp_path / "missing"):
        found = draftwood_command("serve", *TINY, "--api-key-file", str(file))
        assert (found.code, "file of API keys" in found.err) == (2, True)


def test_invalid_host_is_reported(draftwood_command: Command) -> None:
    result = draftwood_command("serve", *TINY, "--host", "203.0.113.1", "--port", "0")
    assert result.code == 2
    assert "203.0.113.1" in result.err


@pytest.mark.parametrize("package", ["uvicorn", "starlette", "prometheus_client"])
def test_without_the_extra(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    result = draftwood_command("serve", *TINY)
    assert result.code == 2
    assert "draftwood[serve]" in result.err


def test_help(draftwood_command: Command) -> None:
    result = draftwood_command("serve", "--help")
    assert result.code == 0
    assert "/v1/chat/completions" in result.out


@pytest.mark.skipif(sys.platform != "linux", reason="heaps of glibc")
def test_threads_share_heaps_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwood.cli.generation.serve import M_ARENA_MAX, MAX_HEAPS, _share_heaps

    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *given: calls.append(given))
    monkeypatch.setattr("ctypes.CDLL", lambda _: library)
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    _share_heaps()
    assert calls == [(M_ARENA_MAX, MAX_HEAPS)]
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    _share_heaps()
    assert len(calls) == 1
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    _share_heaps()  # another C library
