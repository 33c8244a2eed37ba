"""``draftwood serve``: an OpenAI-compatible server for one model."""

import argparse
import ctypes
import gc
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from draftwood.cli.console import Screen, load_llm
from draftwood.cli.generation.parser import API_KEY
from draftwood.config import whole
from draftwood.disk import check_output
from draftwood.errors import MissingExtraError, OptionError
from draftwood.models import short_name

M_ARENA_MAX, MAX_HEAPS = -8, 2  # the first one is a constant of glibc
PACKAGES = ("uvicorn", "starlette", "prometheus_client")  # of the extra "serve"


def run(args: argparse.Namespace) -> int:
    whole("--port", args.port, 0, 65535)
    whole("--max-waiting", args.max_waiting, 0)
    whole("--max-connections", args.max_connections, 1)
    if args.max_connections_per_address is not None:
        whole("--max-connections-per-address", args.max_connections_per_address, 1)
    if not 0 < args.client_timeout < math.inf:
        raise OptionError("--client-timeout is out of range", got=args.client_timeout, allowed="a number above 0")
    if args.request_log not in (None, "-"):
        check_output(Path(args.request_log), force=True)
    for package in PACKAGES:
        if find_spec(package) is None:
            raise MissingExtraError("draftwood serve", package, "serve")
    from draftwood.serve import ServerOptions, create_server, listen, server_url

    _share_heaps()
    screen = Screen(args.color)
    options = ServerOptions(
        names=tuple(dict.fromkeys(args.name or [short_name(args.model)])),
        api_keys=_api_keys(args.api_key, args.api_key_file),
        share_cache=args.share_cache,
        allow_hosts=(args.host, *args.allow_host),
        allow_origin=args.allow_origin,
        max_samples=args.max_batch + args.max_waiting,
        max_connections=args.max_connections,
        max_connections_per_address=args.max_connections_per_address or args.max_connections // 2 or 1,
        client_seconds=args.client_timeout,
        playground=args.playground,
        strict=args.strict,
        request_log=args.request_log,
    )
    with (
        listen(args.host, args.port) as listener,
        load_llm(args, screen, max_batch=args.max_batch, cache_tokens=args.cache_tokens) as llm,
        suppress(KeyboardInterrupt),  # Ctrl-C stops the server
    ):
        llm.budget  # noqa: B018 - prepares passes now, not during the first request
        _leave_loaded_objects()
        url = server_url(listener)
        page = f", playground at {url}/" if options.playground else ""
        ready = f"{options.names[0]}, drafter {llm.drafter}, at {url}/v1{page}. Press Ctrl-C to stop."
        create_server(llm, options, lambda: screen.note(ready)).run(sockets=[listener])
    return 0


def _share_heaps() -> None:
    """Let the threads of this process share heaps: each of them keeps the memory of its largest request. Linux only."""
    if sys.platform == "linux" and "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(OSError, AttributeError):  # a C library without this setting
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, MAX_HEAPS)


def _leave_loaded_objects() -> None:
    """Exclude what is loaded from garbage collection. All requests wait while hundreds of thousands of objects are
    looked through, for 90 ms on a slow core, and none of these ever becomes garbage."""
    gc.collect()
    gc.freeze()


def _api_keys(given: Sequence[str], file: str | None) -> tuple[str, ...]:
    """Read the keys. An empty one is most likely an unset variable in a script, so it does not mean "no key"."""
    keys = (*given, *_read_keys(file)) if given or file is not None else ()
    if not keys and API_KEY in os.environ:
        keys = tuple(os.environ[API_KEY].split(","))
    if not all(key.strip() for key in keys):
        raise OptionError("The API key is empty", next_step=f"Set --api-key or {API_KEY} to a value, or omit both.")
    return tuple(key.strip() for key in keys)


def _read_keys(file: str | None) -> tuple[str, ...]:
    if file is None:
        return ()
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError("The file of API keys cannot be read", got=f"{file}: {error}") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise OptionError("The file of API keys has no key", got=file, allowed="one key per line; # starts a comment")
    return keys
