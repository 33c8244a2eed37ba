"""``draftwood serve``: an OpenAI-compatible server for one model."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from draftwood.cli.console import Screen, Subparsers, add_command, add_drafting_options, load_llm
from draftwood.config import whole
from draftwood.errors import MissingExtraError, OptionError

API_KEY = "DRAFTWOOD_API_KEY"
PACKAGES = ("uvicorn", "starlette", "prometheus_client")  # of the extra "serve"


def register(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "serve",
        run,
        "Serve a model with OpenAI's API",
        "draftwood serve",
        "draftwood serve --model MODEL.gguf --host 0.0.0.0 --port 9000 --max-batch 32",
        "curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\",
        '  -d \'{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "stream": true}\'',
        details="Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics.",
    )
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, local clients only)")
    add("--port", type=int, default=8000, metavar="N", help="port to listen on; 0: any free port (default: 8000)")
    add("--name", action="append", default=[], help="model name exposed by the API; repeatable (default: MODEL)")
    add("--api-key", metavar="KEY", help=f"API key required from clients (default: {API_KEY}, or no key)")
    add("--allow-origin", metavar="URL", help="allow requests from web pages of this origin (CORS); '*': any origin")
    add("--max-batch", type=int, default=8, metavar="N", help="maximum number of running requests (default: 8)")
    add("--max-waiting", type=int, default=256, metavar="N", help="maximum number of queued requests (default: 256)")
    add("--cache-tokens", type=int, metavar="N", help="KV cache capacity in tokens (default: auto)")
    add_drafting_options(parser)
    # Most of a chat turn's prompt is in the cache already, so the drafter must keep what it learned from earlier turns.
    parser.set_defaults(memory="process")


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
        suppress(KeyboardInterrupt),  # it stopped the server
    ):
        llm.budget  # noqa: B018 - measures costs now, not during the first request
        ready = f"{llm.info.name}, drafted by {llm.drafter}, at {server_url(listener)}/v1. Press Ctrl-C to stop."
        create_server(llm, options, lambda: screen.note(ready)).run(sockets=[listener])
    return 0


def _api_key(given: str | None) -> str | None:
    """Read the key. An empty one is most likely an unset variable in a script, so it does not mean "no key"."""
    key = os.environ.get(API_KEY) if given is None else given
    if key is not None and not key.strip():
        raise OptionError("The API key is empty", next_step=f"Set --api-key or {API_KEY} to a value, or omit both.")
    return key
