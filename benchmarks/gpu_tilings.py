"""Searches tilings of the products and attention for a GPU, timed in whole passes.

    python benchmarks/gpu_tilings.py --shape 1.5B --rows 64 --seconds 120 --workers 4 --out tilings.json
    python benchmarks/gpu_tilings.py --shape 8B --rows 64 --parts attention,gate_up --workers 4

A product that is fast alone may be slow in a pass, where other kernels compete for resources and cache. So a pass of
a random model is captured for every candidate tiling of one of the four products of a layer or its attention, and
timed alternately with the current tiling. Each worker has its own weights and compiles separately, which takes most of
the time; a lock lets one worker time at a time.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import queue
import random
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton

from draftwood.disk.files import write_json
from draftwood.errors import CapabilityError, DraftwoodError, OptionError
from draftwood.models.config import ModelConfig
from draftwood.models.tensors import tensor_shapes
from draftwood.targets.cache import KVCache
from draftwood.targets.native.cuda import passes as passes_module
from draftwood.targets.native.cuda.attention.plan import AttentionConfig, choose_config
from draftwood.targets.native.cuda.decoder import ROWS
from draftwood.targets.native.cuda.device import build_rotation_table, capture, describe_gpu, supports_pdl
from draftwood.targets.native.cuda.inputs import new_moves
from draftwood.targets.native.cuda.passes import Model, Pass, Shape, new_pass
from draftwood.targets.native.cuda.products import launch as products
from draftwood.targets.native.cuda.products.launch import MAX_ROWS, Gpu, Kind, Tiling
from draftwood.targets.native.cuda.workspace import Workspace
from draftwood.targets.native.decoder import PackedBatch, PackedSegment
from draftwood.targets.native.weights import assemble
from gpu_candidates import Dims, attention_candidates, candidates, layer_products
from gpu_shapes import SHAPES

CONTEXT = 1024  # positions before the tree
NUM_BEST = 10
ATTENTION = "attention"
AHEAD_CYCLES = 2_000_000  # sleep, so that the host issues all passes before the first starts
WARM_UP, REPLAYS, TURNS = 5, 12, 6  # passes before, passes of a measurement, measurements of either
SHOWN = 80  # characters of an error


Cut = Tiling | AttentionConfig


class Found(NamedTuple):
    part: str
    cut: Cut
    base_ms: float  # of the pass with the current tiling, measured alternately
    ms: float

    @property
    def ratio(self) -> float:
        return self.ms / self.base_ms


def as_it_is(config: ModelConfig, rows: int, gpu: Gpu) -> dict[str, Cut]:
    """Return the current tilings of a layer."""
    found: dict[str, Cut] = {
        name: products.choose_tiling(*dims[:2], padded(rows), gpu, dims.kind)
        for name, dims in layer_products(config).items()
    }
    found[ATTENTION] = choose_config(
        num_nodes=ROWS[bisect_left(ROWS, rows)], num_sequences=1, num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, num_processors=gpu.num_processors,
        shared_bytes=gpu.shared_bytes,
    )  # fmt: skip
    return found


def told(cut: Cut) -> dict[str, Any]:
    return cut._asdict() if isinstance(cut, Tiling) else asdict(cut)


def padded(rows: int) -> int:
    """As products see them."""
    return max(16, int(triton.next_power_of_2(rows)))


def trials(shape: str, rows: int, gpu: Gpu, parts: Sequence[str]) -> list[tuple[str, Cut]]:
    """Interleave the parts, so that a run that ends early covers all of them."""
    config = SHAPES[shape]
    dims, now = layer_products(config), as_it_is(config, rows, gpu)
    mixed = []
    for name in parts:
        found: Sequence[Cut]
        found = candidates(dims[name], padded(rows), gpu) if name in dims else attention_candidates(config, rows, gpu)
        others = [(name, cut) for cut in found if cut != now[name]]
        random.Random(1).shuffle(others)
        mixed.append(others)
    return [trial for each in itertools.zip_longest(*mixed) for trial in each if trial is not None]


@contextmanager
def cut(changes: Mapping[str, Cut], config: ModelConfig) -> Iterator[None]:
    """Use this tiling for passes captured in the context."""
    usual = products.choose_tiling
    tilings = {dims: changes[name] for name, dims in layer_products(config).items() if name in changes}

    def choose_product(num_in: int, num_out: int, rows: int, gpu: Gpu, kind: Kind, *rest: int, **options: bool) -> Cut:
        return tilings.get(Dims(num_in, num_out, kind)) or usual(num_in, num_out, rows, gpu, kind, *rest, **options)

    def choose_attention(**what: int) -> Cut:
        return changes.get(ATTENTION) or choose_config(**what)

    with (
        patch.object(products, "choose_tiling", choose_product),
        patch.object(passes_module, "choose_config", choose_attention),
    ):
        yield


class Passes:
    """Passes of a random model over a tree."""

    def __init__(self, config: ModelConfig, rows: int, device: torch.device, context: int = CONTEXT) -> None:
        generator = torch.Generator(device).manual_seed(0)
        shapes, dtype = tensor_shapes(config), torch.bfloat16

        def weight(name: str) -> torch.Tensor:
            mean = 1.0 if "norm" in name else 0.0
            return torch.empty(shapes[name], dtype=dtype, device=device).normal_(mean, 0.02, generator=generator)

        num_slots = context + rows
        cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, num_slots, dtype, device)
        for kept in (cache.keys, cache.values):  # random values take as long as real ones
            kept.normal_(generator=generator)
        rotation = build_rotation_table(config, num_slots, dtype, device)
        self._model = Model(
            config, assemble(config, weight), cache, rotation, describe_gpu(device), supports_pdl(device)
        )
        self._workspace = Workspace(config, dtype, device)
        num_rows = ROWS[bisect_left(ROWS, rows)]
        self._shape = Shape(num_rows, 1, num_rows, NUM_BEST)
        parents = [-1, *((node - 1) // 2 for node in range(1, rows))]
        ids = [37 * node % config.vocab_size for node in range(rows)]
        self._batch = PackedBatch.of(ids, [PackedSegment(0, 0, context, parents, rows)])

    @torch.inference_mode()
    def launched(self, changes: Mapping[str, Cut]) -> Pass:
        """Run the pass once, to compile its kernels."""
        with cut(changes, self._model.config):
            work = new_pass(self._model, self._shape, self._workspace)
        work.inputs.fill(self._batch, new_moves())
        work.launch()
        return work


class Timed:
    """A captured pass."""

    def __init__(self, work: Pass, stream: torch.cuda.Stream, device: torch.device) -> None:
        self._work = work  # the graph reads its memory
        with torch.inference_mode():
            self._graph = capture(work.launch, stream, device)

    def ms(self, count: int) -> float:
        """Mean time of consecutive passes."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(count):
            self._graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / count


def side_by_side(base: Timed, other: Timed) -> tuple[float, float]:
    """Compare medians, measured alternately."""
    for each in (base, other):
        each.ms(WARM_UP)
    pairs = [(base.ms(REPLAYS), other.ms(REPLAYS)) for _ in range(TURNS)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def work(args: argparse.Namespace, number: int, lock: Any, results: Any) -> None:
    """Worker: time its share of the trials within the time limit. Sends None at the end, strings as messages."""
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        passes = Passes(SHAPES[args.shape], args.rows, device)
        base = Timed(passes.launched({}), stream, device)
        until = time.monotonic() + args.seconds
        for name, changed in trials(args.shape, args.rows, describe_gpu(device), args.parts)[number :: args.workers]:
            if time.monotonic() > until:
                break
            try:
                other = Timed(passes.launched({name: changed}), stream, device)
            except Exception as error:  # noqa: BLE001 - report a tiling that does not compile and continue
                results.put(f"{name} {_cells(changed)} failed: {str(error)[:SHOWN]}".replace("\n", " "))
                torch.cuda.synchronize()  # fails after a fatal CUDA error
                continue
            with lock:
                base_ms, ms = side_by_side(base, other)
            results.put(Found(name, changed, base_ms, ms))
    except KeyboardInterrupt:
        pass
    except Exception as error:  # noqa: BLE001 - report it to the parent
        results.put(f"worker {number} ended: {error}")
    finally:
        results.put(None)


def gather(args: argparse.Namespace, found: list[Found]) -> None:
    """Collect the results of all workers."""
    context = multiprocessing.get_context("spawn")  # a fork cannot use CUDA
    lock, results = context.Lock(), context.Queue()
    workers = [context.Process(target=work, args=(args, number, lock, results)) for number in range(args.workers)]
    for worker in workers:
        worker.start()
    left = len(workers)
    try:
        while left and (any(worker.is_alive() for worker in workers) or not results.empty()):
            try:
                said = results.get(timeout=1.0)
            except queue.Empty:
                continue
            if said is None:
                left -= 1
            elif isinstance(said, str):
                print(said, file=sys.stderr, flush=True)
            else:
                found.append(said)
                print(f"{said.part} {_cells(said.cut)}: {said.ratio:.4f}", file=sys.stderr, flush=True)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _cells(cut: Cut) -> str:
    return ", ".join(str(value) for value in told(cut).values())


def lines(found: Sequence[Found], now: Mapping[str, Cut], top: int) -> Iterator[str]:
    """Format a table: for every part the current tiling, then the best candidates."""
    for name, cut in now.items():
        yield f"\n| {name}: {', '.join(told(cut))} | ms of a pass | as it is | ratio |"
        yield "| --- " * 4 + "|"
        yield f"| {_cells(cut)} | - | - | as it is |"
        own = sorted((each for each in found if each.part == name), key=lambda each: each.ratio)
        for each in own[:top]:
            yield f"| {_cells(each.cut)} | {each.ms:.4f} | {each.base_ms:.4f} | {each.ratio:.4f} |"


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5B", help=f"one of {', '.join(SHAPES)} (default: 1.5B)")
    parser.add_argument("--rows", type=int, default=MAX_ROWS, help=f"positions per pass (default: {MAX_ROWS})")
    parts = (*layer_products(SHAPES["1.5B"]), ATTENTION)
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), default=parts, help=f"some of {','.join(parts)} (default: all)"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit per worker (default: 120)")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--top", type=int, default=10, help="rows per part in the table (default: 10)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all timings to a JSON file")
    args = parser.parse_args(argv)
    if args.shape not in SHAPES:
        raise OptionError("There is no such shape", got=args.shape, allowed=SHAPES)
    if unknown := [name for name in args.parts if name not in parts]:
        raise OptionError("There is no such part of a layer", got=", ".join(unknown), allowed=parts)
    if not 1 <= args.rows <= MAX_ROWS:
        allowed = f"1 to {MAX_ROWS}: larger passes take their products from the vendor's library"
        raise OptionError("--rows is out of range", got=args.rows, allowed=allowed)
    if min(args.workers, args.top) < 1 or args.seconds <= 0.0:
        raise OptionError("--workers, --top and --seconds count something", allowed="more than 0")
    if not torch.cuda.is_available():
        raise CapabilityError("There is no GPU here", next_step="Run it on the GPU to tune for.")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    found: list[Found] = []
    code = 0
    try:
        args = parsed(argv)
        gpu = describe_gpu(torch.device("cuda", torch.cuda.current_device()))
        now = {name: as_it_is(SHAPES[args.shape], args.rows, gpu)[name] for name in args.parts}
        print(f"{len(trials(args.shape, args.rows, gpu, args.parts))} tilings to try", file=sys.stderr, flush=True)
        try:
            gather(args, found)
        except KeyboardInterrupt:
            print("\ninterrupted; so far:", file=sys.stderr)
            code = 130
        print(f"{torch.cuda.get_device_name()}, {args.shape}, {args.rows} rows, {len(found)} tilings timed\n")
        print("\n".join(lines(found, now, args.top)))
        if args.out:
            usual = {name: told(each) for name, each in now.items()}
            timed = [{**each._asdict(), "cut": told(each.cut), "ratio": each.ratio} for each in found]
            write_json(args.out, {"shape": args.shape, "rows": args.rows, "as_it_is": usual, "timed": timed})
    except DraftwoodError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
