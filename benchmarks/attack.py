"""Attack your own server, over loopback and for a few minutes, and check that it withstands.

    python benchmarks/attack.py                                     # starts draftwood serve with the default model
    python benchmarks/attack.py -- --model MODEL.gguf --max-batch 4   # options of draftwood serve
    python benchmarks/attack.py --url http://127.0.0.1:8000 --pid 4711  # a server that runs already

Five attacks: requests of wrong types and sizes; clients that disconnect at random; a mix of clients that read whole
answers, read slowly, or leave; bodies that arrive slowly or in part; idle connections, more than the server admits.
Meanwhile /health is asked several times per second. The server must answer nothing with a status of 500 or above,
answer /health within one second, grow by no more than 10% of its memory, and have nothing left open in the end. The
exit code is 1 if it does not.

The pages of the KV cache count apart: they are taken when a slot is first used, up to the size of the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attack_clients import (
    AnswerTimes,
    Server,
    disconnect_at_random,
    mix_clients,
    send_odd_requests,
    send_slowly,
    stay_idle,
)

MAX_HEALTH_SECONDS = 1.0
MAX_GROWTH = 0.10
NOTHING_OPEN = {"open_samples": 0.0, "held_body_bytes": 0.0, "open_connections": 1.0}  # one connection asks
WARM_UP = 0.25  # of each attack, before anything is measured


class HealthProbe:
    """Asks /health all the time, on new connections."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.worst, self.count, self.failed = 0.0, 0, 0

    async def run(self) -> None:
        while True:
            start = time.monotonic()
            found = await self._server.ask("GET /health")
            self.worst = max(self.worst, time.monotonic() - start)
            self.count += 1
            self.failed += not found.startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.2)


def resident_bytes(pid: int | None, cache_bytes: float) -> tuple[int, int] | None:
    """Memory of a process without its KV cache, and that of the cache; None where it cannot be read.

    The keys and the values of the cache are one large mapping each, or both one.
    """
    with suppress(OSError):
        maps = re.split(r"^(?=[0-9a-f]+-)", Path(f"/proc/{pid}/smaps").read_text(), flags=re.MULTILINE)[1:]
        sizes = [[1024 * int(size) for size in re.findall(r"\n(?:Size|Rss): +(\d+)", each)] for each in maps]
        cache = min(int(cache_bytes), sum(rss for size, rss in sizes if size >= cache_bytes / 2))
        return sum(rss for _, rss in sizes) - cache, cache
    return None


async def wait_until_idle(server: Server, seconds: float) -> dict[str, float]:
    end = time.monotonic() + seconds
    while (gauges := select_open(await server.get_gauges())) != NOTHING_OPEN and time.monotonic() < end:
        await asyncio.sleep(0.5)
    return gauges


def select_open(gauges: dict[str, float]) -> dict[str, float]:
    return {name: gauges[name] for name in NOTHING_OPEN if name in gauges}


async def attack(args: argparse.Namespace, url: str, pid: int | None) -> dict[str, Any]:
    server, rng, times = Server(url), random.Random(args.seed), list[AnswerTimes]()
    cache_bytes = (await server.get_gauges()).get("cache_bytes", 0.0)

    def parts(share: float, times: list[AnswerTimes]) -> dict[str, Coroutine[Any, Any, None]]:
        seconds = share * args.seconds
        return {
            "odd requests": send_odd_requests(server, rng, int(share * args.requests), args.clients),
            "disconnects": disconnect_at_random(server, rng, args.clients, seconds),
            "mixed clients": mix_clients(server, rng, args.clients, seconds, times),
            "slow bodies": send_slowly(server, rng, seconds),
            "idle connections": stay_idle(server, seconds),
        }

    # Memory is compared with that of a server that has met all of this once: caches fill, pages are touched.
    for part in parts(WARM_UP, []).values():
        await part
    await wait_until_idle(server, args.patience)
    before, responses = resident_bytes(pid, cache_bytes), await server.get_responses()
    server.statuses.clear()
    rows = []
    for name, part in parts(1.0, times).items():
        probe, began = HealthProbe(server), time.monotonic()
        probing = asyncio.create_task(probe.run())
        await part
        probing.cancel()
        seconds = time.monotonic() - began
        rows.append({"attack": name, "seconds": seconds, "worst_health": probe.worst, "health_failed": probe.failed})
        print(f"{name:18}{seconds:8.1f} s   worst /health {probe.worst:.3f} s of {probe.count}, {probe.failed} failed")
    gauges = await wait_until_idle(server, args.patience)
    after = resident_bytes(pid, cache_bytes)
    return {
        "rows": rows,
        "responses": dict(sorted((await server.get_responses() - responses).items())),
        "statuses": dict(sorted(server.statuses.items())),
        "gauges": gauges,
        "times": times,
        "cache_bytes": (0 if before is None else before[1], 0 if after is None else after[1], int(cache_bytes)),
        "bytes_before": before and before[0],
        "bytes_after": after and after[0],
    }


def judge(result: dict[str, Any]) -> list[str]:
    """What the server did not withstand."""
    found = []
    for side in ("responses", "statuses"):  # what the server counted, and what clients read
        found += [f"{count} {side} of {status}" for status, count in result[side].items() if status.startswith("5")]
    for row in result["rows"]:
        if row["worst_health"] > MAX_HEALTH_SECONDS or row["health_failed"]:
            found.append(f"{row['attack']}: /health took {row['worst_health']:.2f} s, {row['health_failed']} failed")
    if result["gauges"] != NOTHING_OPEN:
        found.append(f"still open: {result['gauges']}")
    before, after = result["bytes_before"], result["bytes_after"]
    if before and after and after > before * (1 + MAX_GROWTH):
        found.append(f"memory grew from {before:,} to {after:,} bytes")
    return found


def print_times(times: list[AnswerTimes]) -> None:
    print(f"answers that clients of the mix read: {len(times)}")
    if len(times) > 1:
        for name, seconds in zip(("first token", "whole answer"), zip(*times, strict=True), strict=True):
            cuts = statistics.quantiles(seconds, n=100, method="inclusive")
            print(f"{name:14} p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s")


@contextmanager
def start_server(options: list[str]) -> Iterator[tuple[str, int]]:
    """Run draftwood serve and yield its address and process id. Its log is shown at the end."""
    command = [sys.executable, "-m", "draftwood", "serve", "--port", "0", *options]
    with tempfile.NamedTemporaryFile("r+") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            while not (match := re.search(r"(http://\S+)/v1[.,]", Path(log.name).read_text())):
                if process.poll() is not None:
                    sys.exit(f"the server did not start\n{Path(log.name).read_text()}")
                time.sleep(0.2)
            yield match[1], process.pid
        finally:
            process.terminate()
            process.wait()
            text = Path(log.name).read_text()
            print(f"log of the server: {len(text):,} characters\n{text[-3000:]}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="server that runs already, on this machine")
    parser.add_argument("--pid", type=int, help="its process id, to measure its memory")
    parser.add_argument("--requests", type=int, default=5000, help="odd requests (default: 5000)")
    parser.add_argument("--clients", type=int, default=64, help="concurrent clients (default: 64)")
    parser.add_argument("--seconds", type=float, default=40.0, help="length of each other attack (default: 40)")
    parser.add_argument("--patience", type=float, default=90.0, help="time for the server to get idle (default: 90)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", help="options of draftwood serve, after --")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096) if hard > 0 else 4096, hard))
    if args.url:
        result = asyncio.run(attack(args, args.url, args.pid))
    else:
        with start_server(args.options) as (url, pid):
            result = asyncio.run(attack(args, url, pid))
    for side, what in (("responses", "sent by the server"), ("statuses", "read by clients")):
        print(f"{what}:", ", ".join(f"{status}: {count}" for status, count in result[side].items()))
    print("open in the end:", result["gauges"])
    print_times(result["times"])
    print(f"memory: {result['bytes_before'] or 0:,} bytes before, {result['bytes_after'] or 0:,} after")
    print("KV cache: {:,} bytes before, {:,} after, of {:,}".format(*result["cache_bytes"]))
    problems = judge(result)
    print("\n".join(f"FAILED: {problem}" for problem in problems) or "passed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
