"""Compare the throughput of the server with that of the library: the same requests over HTTP and by direct calls.

    python benchmarks/serving.py --limit 8 --clients 1,8
    python benchmarks/serving.py --model MODEL.gguf --data prompts.jsonl --clients 1,32 --max-tokens 256

Both run in one process, in alternating rounds; the clients run in another one. Each client sends its next request,
greedy and streamed, as soon as it has the last response. Throughput is all output tokens over the time from the first
request to the last response, including prefill. "CPU" is the processor time of that process per token, without the
clients. "first text" is the median time to the first text of a response. The library gets all prompts at once and runs
as many of them together as there are clients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from draftwood import LLM, SamplingParams
from draftwood.disk.files import write_json
from draftwood.engine import GenerationRequest
from draftwood.errors import OptionError
from draftwood.prompts import read_prompts
from draftwood.serve import ServerOptions, create_server, listen, server_url
from outcome import exit_code

BUILTIN_PROMPTS = ("Name three trees.", "What is a loop?", "Write a haiku about rain.", "Count to twenty.")
NAME = "model"
CLIENTS = Path(__file__).with_name("stream_clients.py")


class ServingRound(NamedTuple):
    """All requests once, through the server or the library."""

    tokens_per_second: float
    cpu_seconds: float  # per token
    first_seconds: float | None
    texts: list[str]


@contextmanager
def start_server(llm: LLM, num_clients: int) -> Iterator[str]:
    """Run a server for the model in a thread and yield its URL."""
    with listen("127.0.0.1", 0) as listener:
        ready = threading.Event()
        server = create_server(llm, ServerOptions(names=(NAME,), max_samples=2 * num_clients), ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            ready.wait()
            yield server_url(listener)
        finally:
            server.should_exit = True
            thread.join()


def run_on_server(
    url: str, prompts: Sequence[object], num_clients: int, max_tokens: int, *, cycles: bool = False
) -> ServingRound:
    stream_options = {"include_usage": True, "include_cycles": cycles}
    fields = {"model": NAME, "max_tokens": max_tokens, "temperature": 0, "stream_options": stream_options}
    job = json.dumps({"url": url, "chats": prompts, "clients": num_clients, "fields": fields})
    started = time.process_time()
    found = subprocess.run([sys.executable, CLIENTS], input=job, capture_output=True, text=True, check=True)
    cpu_seconds = time.process_time() - started
    result = json.loads(found.stdout)
    responses = result["responses"]
    num_tokens = sum(response["num_tokens"] for response in responses)
    first = statistics.median(response["first_seconds"] for response in responses)
    texts = [response["text"] for response in responses]
    return ServingRound(num_tokens / result["seconds"], cpu_seconds / num_tokens, first, texts)


def run_in_library(llm: LLM, prompts: Sequence[object], max_tokens: int) -> ServingRound:
    """Submit all prompts to the engine. Cached prefixes are reused, as the server does for chats."""
    params, factory = SamplingParams(max_tokens=max_tokens), llm.factory()
    started, cpu_started = time.perf_counter(), time.process_time()
    texts: dict[int, str] = {}
    num_tokens = 0
    for prompt in prompts:
        ids = llm.tokenizer.apply_chat(prompt)  # type: ignore[arg-type]
        texts |= dict.fromkeys(
            llm.engine.submit(GenerationRequest(prompt_ids=tuple(ids), params=params, drafter=factory, reuse=True)), ""
        )
    for event in llm.engine.events(list(texts)):
        texts[event.request_id] += event.text
        num_tokens += len(event.token_ids)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return ServingRound(num_tokens / seconds, cpu_seconds / num_tokens, None, list(texts.values()))


def compare(args: argparse.Namespace, num_clients: int, prompts: Sequence[object]) -> dict[str, object]:
    """Return medians over alternating rounds."""
    max_tokens = args.max_tokens
    with LLM(args.model, drafter=args.drafter, budget=args.budget, max_batch=num_clients) as llm:
        llm.generate("warm up", SamplingParams(max_tokens=8))
        with start_server(llm, num_clients) as url:
            rounds = [
                (
                    run_in_library(llm, prompts, max_tokens),
                    run_on_server(url, prompts, num_clients, max_tokens, cycles=args.cycles),
                )
                for _ in range(args.rounds)
            ]
    library, server = zip(*rounds, strict=True)
    speeds = [statistics.median(each.tokens_per_second for each in side) for side in (library, server)]
    cpu = [statistics.median(each.cpu_seconds for each in side) for side in (library, server)]
    same = sum(a == b for a, b in zip(library[0].texts, server[0].texts, strict=True))
    return {
        "clients": num_clients,
        "library_tokens_per_second": speeds[0],
        "server_tokens_per_second": speeds[1],
        "ratio": speeds[1] / speeds[0],
        "library_cpu_seconds": cpu[0],
        "server_cpu_seconds": cpu[1],
        "first_seconds": statistics.median(each.first_seconds for each in server),
        "same_texts": f"{same} of {len(prompts)}",
    }


def format_table(rows: Sequence[dict[str, object]]) -> Iterator[str]:
    yield "| clients | library, tokens/s | server, tokens/s | ratio | CPU per token, ms | first text, ms | same texts |"
    yield "| --- " * 7 + "|"
    for row in rows:
        speeds = f"{row['library_tokens_per_second']:.1f} | {row['server_tokens_per_second']:.1f}"
        cpu = " and ".join(f"{1000.0 * float(row[f'{side}_cpu_seconds']):.2f}" for side in ("library", "server"))  # type: ignore[arg-type]
        first = 1000.0 * float(row["first_seconds"])  # type: ignore[arg-type]
        yield f"| {row['clients']} | {speeds} | {row['ratio']:.3f} | {cpu} | {first:.0f} | {row['same_texts']} |"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2", help="(default: smollm2)")
    add("--drafter", default="goose", help="(default: goose)")
    add("--budget", type=lambda text: text if text == "auto" else int(text), default="auto")
    add("--data", type=Path, metavar="FILE", help="prompts, one per line (default: a few built-in ones)")
    add("--limit", type=int, default=8, metavar="N", help="number of prompts (default: 8)")
    add("--clients", type=lambda text: [int(each) for each in text.split(",")], default=[1, 8])
    add("--max-tokens", type=int, default=64, metavar="N", help="maximum number of tokens per response (default: 64)")
    add("--cycles", action="store_true", help="ask for the tree of each pass (include_cycles)")
    add("--rounds", type=int, default=3, metavar="N", help="(default: 3)")
    add("--out", type=Path, metavar="FILE", help="write the results to this JSON file")
    args = parser.parse_args(argv)
    if min(args.limit, args.max_tokens, args.rounds, *args.clients) < 1:
        raise OptionError("--limit, --clients, --max-tokens and --rounds must be positive", allowed="1 or more")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    def run() -> None:
        args = parse_args(argv)
        chats = [[{"role": "user", "content": text}] for text in islice(cycle(BUILTIN_PROMPTS), args.limit)]
        prompts = read_prompts(args.data, args.limit) if args.data else chats
        rows = []
        for num_clients in args.clients:
            rows.append(compare(args, num_clients, prompts))
            print(f"{num_clients} clients: {rows[-1]['ratio']:.3f}", file=sys.stderr, flush=True)
        print("\n".join(format_table(rows)))
        if args.out:
            write_json(args.out, {"model": args.model, "drafter": args.drafter, "rows": rows})

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
