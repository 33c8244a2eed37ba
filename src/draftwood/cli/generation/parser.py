"""Parsers of the commands in this folder. Light to import: the commands themselves are loaded when they run."""

from __future__ import annotations

import argparse
from typing import Any

from draftwood.cli.options import Subparsers, add_command, add_drafting_options, add_prompt_options, add_run_options


def register_generate(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "generate",
        "generation.generate:run",
        "Answer one prompt",
        "draftwood generate 'Write a haiku about trees.'",
        "draftwood generate --file notes.txt --max-tokens 400 --compare",
        "echo 'def fibonacci(n):' | draftwood generate --raw --json",
        details="The prompt is put to the model as a user's message if the model has a chat template.",
    )
    add_prompt_options(parser)
    parser.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, help="show tokens as they come (default: on a terminal)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    parser.add_argument("--compare", action="store_true", help="decode plainly too; say how much faster it was")
    parser.add_argument(
        "--prediction",
        metavar="F",
        help="a file with the answer that you expect, such as a program of which a line is to change: faster, if it is "
        "about right",
    )
    parser.add_argument("--n", type=int, default=1, help="samples of the prompt (default: 1)")
    parser.add_argument("--logprobs", type=int, metavar="K", help="show each token's probability and K alternatives")
    add_run_options(parser)


def register_chat(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "chat",
        "generation.chat:run",
        "Talk with a model in the terminal",
        "draftwood chat",
        "draftwood chat --system 'Answer in one sentence.' --max-tokens 512",
        "echo 'What is a tree?' | draftwood chat --temperature 0.7 --seed 1",
    )
    parser.add_argument("--system", metavar="TEXT", help="how the model is to behave")
    add_run_options(parser)
    # A turn finds most of its prompt in the cache, so what drafters learnt from it must outlive the turn before.
    parser.set_defaults(memory="process")


API_KEY = "DRAFTWOOD_API_KEY"


def register_serve(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "serve",
        "generation.serve:run",
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


_CHECK_DETAILS = """\
Where the outputs part, both tokens are looked up in the model's own distribution. If neither lies
further below the best token than rounding can move it in the chosen dtype, the difference is a
numeric tie: either is the model's answer. Anything else is an ERROR, and the exit code is 1."""


def register_check(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "check",
        "generation.check:run",
        "Compare speculative with plain greedy decoding, token for token",
        "draftwood check --prompts prompts.txt --dtype float32",
        "draftwood check --prompts humaneval.jsonl --limit 20 --drafter stand",
        "draftwood check --prompts prompts.txt --json",
        details=_CHECK_DETAILS,
    )
    parser.add_argument(
        "--prompts", metavar="FILE", required=True, help="one prompt a line; .jsonl: 'prompt', 'turns' or 'messages'"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    parser.add_argument("--raw", action="store_true", help="prompts are texts to continue: no chat template")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_run_options(parser)


def register(commands: Subparsers[Any]) -> None:
    for register_command in (register_generate, register_chat, register_serve, register_check):
        register_command(commands)
