"""``draftwood serve``: an OpenAI-compatible server for one model."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from importlib.util import find_spec

from draftwood.cli.console import Screen, load_llm
from draftwood.cli.generation.parser import API_KEY
from draftwood.config import whole
from draftwood.errors import MissingExtraError, OptionError

PACKAGES = ("uvicorn", "starlette", "prometheus_client")  # of the extra "serve"


def run(args: argparse.Namespace) -> int:
    whole("--port", args.port, 0, 65535)
    whole("--max-waiting", args.max_waiting, 0)
    for package in PACKAGES:
        if find_spec(package) is None:
            raise MissingExtraError("draftwood serve", package, "serve")
    from draftwood.serve import ServerOptions, create_server, listen, server_url

    screen = Screen(args.color)
    options = ServerOptions(
        names=tuple(dict.fromkeys(args.name or [args.model])),
        api_key=_api_key(args.api_key),
        allow_origin=args.allow_origin,
        max_samples=args.max_batch + args.max_waiting,
    )
    with (
        listen(args.host, args.port) as listener,
        load_llm(args, screen, max_batch=args.max_batch, cache_tokens=args.cache_tokens) as llm,
        suppress(KeyboardInterrupt),  # Ctrl-C stops the server
    ):
        llm.budget  # noqa: B018 - prepares passes now, not during the first request
        ready = f"{llm.info.name}, drafter {llm.drafter}, at {server_url(listener)}/v1. Press Ctrl-C to stop."
        create_server(llm, options, lambda: screen.note(ready)).run(sockets=[listener])
    return 0


def _api_key(given: str | None) -> str | None:
    """Read the key. An empty one is most likely an unset variable in a script, so it does not mean "no key"."""
    key = os.environ.get(API_KEY) if given is None else given
    if key is not None and not key.strip():
        raise OptionError("The API key is empty", next_step=f"Set --api-key or {API_KEY} to a value, or omit both.")
    return key
