"""``draftwood serve``: a model behind OpenAI's API."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from typing import Any

from draftwood.cli.console import Screen, Subparsers, add_command, add_drafting_options, load_llm
from draftwood.config import whole
from draftwood.errors import OptionError

API_KEY = "DRAFTWOOD_API_KEY"


def register(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "serve",
        run,
        "Serve a model to OpenAI's clients",
        "draftwood serve",
        "draftwood serve --model MODEL.gguf --host 0.0.0.0 --port 9000 --max-batch 32",
        "curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\",
        '  -d \'{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "stream": true}\'',
        details="Paths: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics.",
    )
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1, this machine alone)")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="0: any that is free (default: 8000)")
    group.add_argument(
        "--name", action="append", default=[], help="that the model goes by; repeatable (default: MODEL)"
    )
    group.add_argument("--api-key", metavar="KEY", help=f"that clients have to send (default: {API_KEY}, or none)")
    group.add_argument("--allow-origin", metavar="URL", help="let scripts of this web page ask; '*': of any")
    group.add_argument("--max-batch", type=int, default=8, metavar="N", help="requests that run together (default: 8)")
    group.add_argument("--max-waiting", type=int, default=256, metavar="N", help="that wait at most (default: 256)")
    group.add_argument("--cache-tokens", type=int, metavar="N", help="of the cache that they share (default: auto)")
    add_drafting_options(parser)
    # A turn finds most of its prompt in the cache, so what drafters learnt from it must outlive the turn before.
    parser.set_defaults(memory="process")


def run(args: argparse.Namespace) -> int:
    from draftwood.serve import ServerOptions, address, check_installed, listen
    from draftwood.serve import run as serve

    whole("--port", args.port, 0, 65535)
    whole("--max-waiting", args.max_waiting, 0)
    check_installed()
    screen = Screen(args.color)
    options = ServerOptions(
        names=tuple(dict.fromkeys(args.name or [args.model])),
        api_key=_api_key(args.api_key),
        allow_origin=args.allow_origin,
        most_samples=args.max_batch + args.max_waiting,
    )
    with (
        listen(args.host, args.port) as listener,
        load_llm(args, screen, max_batch=args.max_batch, cache_tokens=args.cache_tokens) as llm,
        suppress(KeyboardInterrupt),  # which has ended it
    ):
        llm.budget  # noqa: B018 - costs are measured now, and not while somebody waits for an answer
        what = f"{llm.info.name}, drafted by {llm.drafter}"
        serve(llm, options, listener, lambda: screen.note(f"{what}, at {address(listener)}/v1. Ctrl-C ends it."))
    return 0


def _api_key(given: str | None) -> str | None:
    """An empty one is a slip of a script, and would let everybody in."""
    key = os.environ.get(API_KEY) if given is None else given
    if key is not None and not key.strip():
        raise OptionError("The API key is empty", next_step=f"Give --api-key or {API_KEY} a value, or leave both out.")
    return key
