"""Parsers of the commands in this folder. Commands are imported when they run, so that --help stays fast."""

from __future__ import annotations

import argparse
from typing import Any

from draftwood.cli.options import (
    Subparsers,
    add_command,
    add_drafting_options,
    add_prompt_options,
    add_run_options,
    add_stats_options,
)


def register_generate(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "generate",
        "generation.generate:run",
        "Answer one prompt",
        "draftwood generate 'Write a haiku about trees.'",
        "cat notes.txt | draftwood generate 'Summarise this.' --max-tokens 400 --compare",
        "echo 'def fibonacci(n):' | draftwood generate --raw --json",
        details="If the model has a chat template, the prompt is sent as a user message.",
    )
    add_prompt_options(parser)
    parser.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, help="print tokens as they come (default: on a terminal)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_stats_options(parser)
    parser.add_argument("--compare", action="store_true", help="run plain decoding too and print the speedup")
    parser.add_argument(
        "--prediction",
        metavar="F",
        help="file with the predicted output, such as the source code to edit; faster if most of it is right",
    )
    structure = parser.add_mutually_exclusive_group()
    structure.add_argument("--json-schema", metavar="F", help="file with a JSON schema that the answer must match")
    structure.add_argument("--regex", metavar="PATTERN", help="regular expression that the answer must match")
    structure.add_argument("--grammar", metavar="F", help="file with a grammar (Lark) that the answer must match")
    parser.add_argument("--n", type=int, default=1, help="samples per prompt (default: 1)")
    parser.add_argument("--logprobs", type=int, metavar="K", help="print logprobs of each token and K alternatives")
    add_run_options(parser)


CHAT_TOKENS = 2048  # an answer should end by itself


def register_chat(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "chat",
        "generation.chat:run",
        "Chat with a model in the terminal",
        "draftwood chat",
        "draftwood chat --system 'Answer in one sentence.' --temperature 0.7",
        "echo 'What is a tree?' | draftwood chat --temperature 0.7 --seed 1",
        details="Type /help for commands: save, load, continue an answer, change sampling and drafter.",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_stats_options(parser)
    add_run_options(parser, max_tokens=CHAT_TOKENS)
    # Most of a turn's prompt is in the cache already, so the drafter must keep what it learned from earlier turns.
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
        details="Endpoints: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models,\n"
        "/tokenize, /detokenize, /health, /metrics, /openapi.json; a playground at /.",
    )
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, local clients only)")
    add("--port", type=int, default=8000, metavar="N", help="port to listen on; 0: any free port (default: 8000)")
    add("--name", action="append", default=[], help="model name exposed by the API; repeatable (default: from MODEL)")
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"API key required from clients; repeatable (default: {API_KEY}, separated by commas, or no key)",
    )
    add("--api-key-file", metavar="F", help="file with further API keys, one per line; # starts a comment")
    add(
        "--share-cache",
        action="store_true",
        help="reuse cached prompts across API keys (without keys: addresses), as for a common system prompt",
    )
    add("--allow-origin", metavar="URL", help="allow requests from web pages of this origin (CORS); '*': any origin")
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name under which clients reach a server without a key; repeatable (default: localhost, HOST)",
    )
    add("--max-batch", type=int, default=8, metavar="N", help="maximum number of running requests (default: 8)")
    add("--max-waiting", type=int, default=256, metavar="N", help="maximum number of queued requests (default: 256)")
    add("--cache-tokens", type=int, metavar="N", help="KV cache capacity in tokens (default: auto)")
    add("--max-connections", type=int, default=512, metavar="N", help="maximum number of connections (default: 512)")
    add(
        "--max-connections-per-address",
        type=int,
        metavar="N",
        help="maximum number of connections of one client address (default: half of --max-connections)",
    )
    add(
        "--client-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for a client to send its headers, to send its body, or to go on reading (default: 30)",
    )
    add(
        "--playground",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serve a page to try the model at / (default: yes)",
    )
    add("--strict", action="store_true", help="reject unknown request fields (default: ignore them with a warning)")
    add("--request-log", metavar="F", help="file for one line of JSON per request, without texts; -: standard error")
    add_drafting_options(parser)
    # Most of a chat turn's prompt is in the cache already, so the drafter must keep what it learned from earlier turns.
    parser.set_defaults(memory="process")


_CHECK_DETAILS = """\
At the first difference, both tokens are compared with the top token of the model. If neither is
below it by more than the rounding error of the dtype, the difference is a numeric tie: both tokens
are valid greedy choices. Any other difference is an ERROR, and the exit code is 1."""


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
        "--prompts", metavar="FILE", required=True, help="one prompt per line; .jsonl: 'prompt', 'turns' or 'messages'"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N prompts")
    parser.add_argument("--raw", action="store_true", help="continue prompts as text, without a chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_run_options(parser)


def register(commands: Subparsers[Any]) -> None:
    for register_command in (register_generate, register_chat, register_serve, register_check):
        register_command(commands)
