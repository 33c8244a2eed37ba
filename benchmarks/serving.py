"""Compares the server with the library: the same requests over HTTP and directly, interleaved in one process.

    python benchmarks/serving.py --limit 8 --clients 1,8
    python benchmarks/serving.py --model MODEL.gguf --data prompts.jsonl --clients 1,32 --max-tokens 256

Clients send greedy streaming requests, each as soon as its previous one is finished. Throughput is all output tokens
over the time from the first request to the last output, prefill included. ``first`` is the median time to the first
text. The library gets all prompts at once, with the same batch size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from draftwood import LLM, SamplingParams
from draftwood.disk.files import write_json
from draftwood.errors import OptionError
from draftwood.prompts import read_prompts
from draftwood.serve.app import ServerOptions
from draftwood.serve.server import address, listen, make_server
from outcome import exit_code

OWN_PROMPTS = ("Name three trees.", "What is a loop?", "Write a haiku about rain.", "Count to twenty.")
NAME = "model"


class Answer(NamedTuple):
    text: str
    tokens: int
    first_seconds: float


class Turn(NamedTuple):
    """Run all requests once, over HTTP or directly."""

    tokens_per_second: float
    first_seconds: float | None
    texts: list[str]


@contextmanager
def serving(llm: LLM, clients: int) -> Iterator[str]:
    """Start a server in a thread and return its address."""
    with listen("127.0.0.1", 0) as listener:
        ready = threading.Event()
        server = make_server(llm, ServerOptions(names=(NAME,), most_samples=2 * clients), ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            ready.wait()
            yield address(listener)
        finally:
            server.should_exit = True
            thread.join()


def asked(url: str, messages: object, max_tokens: int) -> Answer:
    """Stream one output."""
    fields = {"model": NAME, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body = json.dumps({**fields, "stream_options": {"include_usage": True}}).encode()
    started, first, texts, tokens = time.perf_counter(), None, [], 0
    with urllib.request.urlopen(f"{url}/v1/chat/completions", body) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    first = first or time.perf_counter() - started
                    texts.append(text)
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    return Answer("".join(texts), tokens, first or 0.0)


def by_server(url: str, prompts: Sequence[object], clients: int, max_tokens: int) -> Turn:
    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda prompt: asked(url, prompt, max_tokens), prompts))
    seconds = time.perf_counter() - started
    first = statistics.median(answer.first_seconds for answer in answers)
    return Turn(sum(answer.tokens for answer in answers) / seconds, first, [answer.text for answer in answers])


def by_library(llm: LLM, prompts: Sequence[object], max_tokens: int) -> Turn:
    """Run directly on the engine, with prefix caching."""
    params, factory = SamplingParams(max_tokens=max_tokens), llm.factory()
    started = time.perf_counter()
    texts: dict[int, str] = {}
    tokens = 0
    for prompt in prompts:
        ids = llm.tokenizer.apply_chat(prompt)  # type: ignore[arg-type]
        texts |= dict.fromkeys(llm.engine.submit(ids, params, factory, reuse=True), "")
    for event in llm.engine.events(list(texts)):
        texts[event.request_id] += event.text
        tokens += len(event.token_ids)
    return Turn(tokens / (time.perf_counter() - started), None, list(texts.values()))


def measured(args: argparse.Namespace, clients: int, prompts: Sequence[object]) -> dict[str, object]:
    """Compute medians over interleaved rounds, after a warm-up."""
    with LLM(args.model, drafter=args.drafter, budget=args.budget, max_batch=clients) as llm:
        llm.generate("warm up", SamplingParams(max_tokens=8))
        with serving(llm, clients) as url:
            rounds = [
                (by_library(llm, prompts, args.max_tokens), by_server(url, prompts, clients, args.max_tokens))
                for _ in range(args.rounds)
            ]
    library, server = zip(*rounds, strict=True)
    speeds = [statistics.median(turn.tokens_per_second for turn in turns) for turns in (library, server)]
    same = sum(a == b for a, b in zip(library[0].texts, server[0].texts, strict=True))
    return {
        "clients": clients,
        "library_tokens_per_second": speeds[0],
        "server_tokens_per_second": speeds[1],
        "ratio": speeds[1] / speeds[0],
        "first_seconds": statistics.median(turn.first_seconds for turn in server),
        "same_texts": f"{same} of {len(prompts)}",
    }


def table(rows: Sequence[dict[str, object]]) -> Iterator[str]:
    yield "| clients | library, tokens/s | server, tokens/s | ratio | first text, ms | same texts |"
    yield "| --- " * 6 + "|"
    for row in rows:
        speeds = f"{row['library_tokens_per_second']:.1f} | {row['server_tokens_per_second']:.1f}"
        first = 1000.0 * float(row["first_seconds"])  # type: ignore[arg-type]
        yield f"| {row['clients']} | {speeds} | {row['ratio']:.3f} | {first:.0f} | {row['same_texts']} |"


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="(default: smollm2)")
    parser.add_argument("--drafter", default="goose", help="(default: goose)")
    parser.add_argument("--budget", type=lambda text: text if text == "auto" else int(text), default="auto")
    parser.add_argument("--data", type=Path, metavar="FILE", help="prompt file (default: built-in prompts)")
    parser.add_argument("--limit", type=int, default=8, metavar="N", help="prompts (default: 8)")
    parser.add_argument("--clients", type=lambda text: [int(each) for each in text.split(",")], default=[1, 8])
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="maximum number of output tokens (default: 64)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures to a JSON file")
    args = parser.parse_args(argv)
    if min(args.limit, args.max_tokens, args.rounds, *args.clients) < 1:
        raise OptionError("--limit, --clients, --max-tokens and --rounds count something", allowed="1 or more")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    def run() -> None:
        args = parsed(argv)
        own = [[{"role": "user", "content": text}] for text in OWN_PROMPTS]
        prompts = read_prompts(args.data, args.limit) if args.data else [own[i % len(own)] for i in range(args.limit)]
        rows = []
        for clients in args.clients:
            rows.append(measured(args, clients, prompts))
            print(f"{clients} clients: {rows[-1]['ratio']:.3f}", file=sys.stderr, flush=True)
        print("\n".join(table(rows)))
        if args.out:
            write_json(args.out, {"model": args.model, "drafter": args.drafter, "rows": rows})

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
