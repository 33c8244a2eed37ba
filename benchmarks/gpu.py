"""Benchmarks the native target on a GPU: passes, cycles and tokens per second.

    python benchmarks/gpu.py --parts forward,context --out gpu.json
    python benchmarks/gpu.py --model MODEL.gguf --data PROMPTS --tasks humaneval --parts cycle,speed,batch
    python benchmarks/gpu.py --shapes tiny --contexts 32,64 --sizes 1,8       # on any machine

Parts: ``forward`` times passes of random models after the first of --contexts, ``context`` also after the others.
``cycle`` (stages of a GOOSE cycle), ``speed`` (tokens per second of one request) and ``batch`` (of many) run --model.

A pass is timed with the host's clock around ``target.forward`` and the read-back of its choices, as a user sees it, and
with CUDA events, as the device sees it. The floor is the size of the weights over the bandwidth of a large copy (read
and write) in the same run. All figures are medians of interleaved repeats.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftwood import LLM, Completion, SamplingParams
from draftwood.bench.records.machine import describe_machine, describe_model, list_versions
from draftwood.bench.tasks.load import load_tasks
from draftwood.config import QUANTIZE, ModelOptions
from draftwood.engine import RequestStats
from draftwood.errors import CapabilityError, DraftwoodError, OptionError
from draftwood.prompts import prompt_ids
from draftwood.targets.base import ForwardOutput, Segment, chain_parents
from draftwood.targets.load import Loaded, load_target, pick_device
from draftwood.targets.native.target import NativeTarget
from gpu_shapes import CONTEXT_LENGTH, SHAPES, random_target

Clock = Callable[[Callable[[], object]], float]  # runs a function; returns seconds
TINY = "tiny"  # a shape, and the name of the built-in model
PARTS = ("forward", "context", "cycle", "speed", "batch")
PASSES, RUNS = PARTS[:2], PARTS[2:]  # of random models; of --model
PREFILL = 512  # positions per chunk
WARM_SECONDS = 1.0  # of work before timing, so that the GPU reaches its usual clock
WARM_SIZE = 8192
WARM_UP = 3  # untimed passes per size: the first ones compile and capture
AHEAD_CYCLES = 4_000_000  # a few ms of sleep, so that the host issues a pass before the device starts it
COPY_BYTES, CPU_COPY_BYTES, COPIES = 1 << 31, 1 << 26, 20
CYCLE_BUDGET = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of the table; ``figures`` are in the last column."""

    part: str
    model: str
    case: str
    ms: float | None = None
    device_ms: float | None = None
    tokens_per_second: float | None = None
    figures: dict[str, float] = field(default_factory=dict)


class Report:
    """Collects rows and writes each to the file at once, since a long run may be interrupted."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: list[Row] = []
        software, machine = list_versions(), describe_machine()
        self.facts: dict[str, Any] = {"argv": sys.argv[1:], "machine": machine, "software": software, "models": {}}

    def add(self, *rows: Row) -> None:
        self.rows += rows
        if self._path is not None:
            content = {**self.facts, "rows": [asdict(row) for row in self.rows]}
            self._path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def lines(self) -> Iterator[str]:
        machine, copies = self.facts["machine"], self.facts.get("copy_gigabytes_per_second", "not measured")
        device = ", ".join(machine.get("gpus") or [machine["processor"]])
        yield f"{device}, torch {torch.__version__}; GB/s of copies, read and write: {copies}"
        for name, model in self.facts["models"].items():
            yield f"{name}: {model['parameters'] / 1e6:,.0f}M parameters, {model['backend']}, {model['dtype']}"
        for name, found in self.facts.get("clocks", {}).items():
            yield f"{name}: clocks of processors and memory {found}"
        yield "\n| part | model | case | ms | device ms | tokens/s | beside it |\n" + "| --- " * 7 + "|"
        for row in self.rows:
            numbers = (_number(row.ms, 3), _number(row.device_ms, 3), _number(row.tokens_per_second, 1))
            beside = ", ".join(f"{name} {_number(value, 3)}" for name, value in row.figures.items())
            yield f"| {' | '.join((row.part, row.model, row.case, *numbers, beside))} |"


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy far larger than any cache of the device."""
    size = COPY_BYTES if device.type == "cuda" else CPU_COPY_BYTES
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    clock = _device_seconds if device.type == "cuda" else _host_seconds
    return 2 * size / median_seconds({0: lambda: copy.copy_(source)}, clock, COPIES)[0]


def median_seconds(runs: Mapping[int, Callable[[], object]], clock: Clock, repeats: int) -> dict[int, float]:
    """Measure each run, interleaved."""
    found: dict[int, list[float]] = {name: [] for name in runs}
    for _ in range(WARM_UP + repeats):
        for name, run in runs.items():
            found[name].append(clock(run))
    return {name: statistics.median(seconds[WARM_UP:]) for name, seconds in found.items()}


def run_passes(args: argparse.Namespace, device: torch.device, report: Report) -> None:
    bandwidth = copy_bandwidth(device)
    report.facts["copy_gigabytes_per_second"] = round(bandwidth / 1e9, 1)
    contexts = args.contexts if "context" in args.parts else args.contexts[:1]
    for name in args.shapes:
        _tell(f"{name}: making weights")
        slots = contexts[-1] + max(args.sizes)
        target = random_target(name, getattr(torch, args.dtype), device, slots, args.quantize, exact=args.exact)
        report.facts["models"][target.info.name] = describe_model(target.info)
        report.add(*pass_rows(target, contexts, args, bandwidth))
        if device.type == "cuda":
            report.facts.setdefault("clocks", {})[name] = clocks(device)
        del target  # free its memory for the next one
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def pass_rows(target: NativeTarget, contexts: list[int], args: argparse.Namespace, bandwidth: float) -> Iterator[Row]:
    info, config = target.info, target.config
    # Untied embeddings are not counted: a pass reads only a few rows.
    looked_up = 0 if config.tied_embeddings else config.vocab_size * config.hidden_size
    floor = (info.num_parameters - looked_up) * (1 if info.quantize else info.dtype.itemsize) / bandwidth
    sequence = target.open(target.num_slots)
    firsts: dict[int, float] = {}  # after the first context
    for context in contexts:
        _tell(f"{info.name}: passes behind {context} positions")
        _fill(target, sequence, context)
        warm_up(info.device)
        passes = {n: partial(target.forward, [_tree(sequence, n, info.vocab_size)]) for n in args.sizes}
        reads = {n: partial(_read, run) for n, run in passes.items()}
        host = median_seconds(reads, _host_seconds, args.repeats)
        on_device = median_seconds(passes, _device_seconds, args.repeats) if info.device.type == "cuda" else {}
        firsts = firsts or host
        for n, seconds in host.items():
            figures = {
                "floor ms": 1e3 * floor,
                "times the floor": seconds / floor,
                f"times n={args.sizes[0]}": seconds / host[args.sizes[0]],
                f"times context {contexts[0]}": seconds / firsts[n],
            }
            row = Row(part=PASSES[context != contexts[0]], model=info.name, case=f"n={n}, context {context}")
            device_ms = 1e3 * on_device[n] if on_device else None
            yield replace(row, ms=1e3 * seconds, device_ms=device_ms, figures=figures)


def warm_up(device: torch.device) -> None:
    if device.type != "cuda":
        return
    matrix = torch.ones(WARM_SIZE, WARM_SIZE, dtype=torch.bfloat16, device=device)
    end = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < end:
        matrix @ matrix
        torch.cuda.synchronize(device)


def clocks(device: torch.device) -> str:
    """Read the current clocks from the driver's tool, if available."""
    command = ["nvidia-smi", f"--id={device.index or 0}", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "not known"


def run_model(args: argparse.Namespace, report: Report) -> None:
    tasks = load_tasks(args.tasks, args.data, args.limit)
    how = {"dtype": args.dtype, "quantize": args.quantize, "exact": args.exact, "device": args.device}
    loaded = load_target(ModelOptions(model=args.model, **how, max_batch=args.batch))
    prompts = [prompt_ids(loaded.codec, prompt.turns[0]) for task in tasks for prompt in task.prompts]
    report.facts["models"][loaded.target.info.name] = describe_model(loaded.target.info)
    report.facts["prompts"] = {task.name: {"number": len(task.prompts), "sha256": task.sha256} for task in tasks}
    if "cycle" in args.parts:
        report.add(cycle_row(loaded, prompts, args))
    if "speed" in args.parts:
        report.add(*speed_rows(loaded, prompts, args, 1))
    if "batch" in args.parts:
        times = -(-args.batch // len(prompts))  # repeat prompts to fill a batch
        report.add(*speed_rows(loaded, prompts * times, args, args.batch))


def cycle_row(loaded: Loaded, prompts: Sequence[list[int]], args: argparse.Namespace) -> Row:
    """Time per cycle by stage: medians over requests of their means."""
    _tell("cycles of goose")
    params = SamplingParams(max_tokens=args.max_tokens)
    with _llm(loaded, "goose", CYCLE_BUDGET, 1) as llm:
        llm.generate([prompts[0]], params)  # warms up
        found = [llm.generate([prompt], params)[0].stats for _ in range(args.rounds) for prompt in prompts]

    def median_ms(seconds: Callable[[RequestStats], float]) -> float:
        return statistics.median(1e3 * seconds(stats) / stats.cycles for stats in found)

    figures = {
        "draft ms": median_ms(lambda stats: stats.draft_seconds),
        "verify ms": median_ms(lambda stats: stats.verify_seconds),
        "accept ms": median_ms(lambda stats: stats.accept_seconds),
        "outside the forward ms": median_ms(lambda stats: _decoding_seconds(stats) - stats.verify_seconds),
        **_about_trees(found),
    }
    case, ms = f"goose, budget {CYCLE_BUDGET}", median_ms(_decoding_seconds)
    return Row(part="cycle", model=loaded.target.info.name, case=case, ms=ms, figures=figures)


def speed_rows(loaded: Loaded, prompts: Sequence[list[int]], args: argparse.Namespace, batch: int) -> Iterator[Row]:
    """Medians over rounds: one request without prefill, a batch by wall-clock time."""
    params = SamplingParams(max_tokens=args.max_tokens)
    groups = [[prompt] for prompt in prompts] if batch == 1 else [list(prompts)]
    llms = {drafter: _llm(loaded, drafter, args.budget, batch) for drafter in args.drafters}
    rates: dict[str, list[float]] = {drafter: [] for drafter in llms}
    answers: dict[str, list[Completion]] = {drafter: [] for drafter in llms}
    for llm in llms.values():
        llm.generate(groups[0], params)  # warms up
    for number in range(args.rounds):
        _tell(f"batch {batch}: round {number + 1} of {args.rounds}")
        tokens, seconds = Counter[str](), dict.fromkeys(llms, 0.0)
        for group in groups:
            for drafter, llm in llms.items():
                started = time.perf_counter()
                made = llm.generate(group, params)
                wall = time.perf_counter() - started
                tokens[drafter] += sum(len(answer.token_ids) for answer in made)
                seconds[drafter] += _decoding_seconds(made[0].stats) if batch == 1 else wall
                answers[drafter] += made
        for drafter in llms:
            rates[drafter].append(tokens[drafter] / seconds[drafter])
    for drafter, llm in llms.items():
        figures = _about_trees([answer.stats for answer in answers[drafter]])
        if "plain" in llms and drafter != "plain":
            ratios = [rate / plain for rate, plain in zip(rates[drafter], rates["plain"], strict=True)]
            pairs = zip(answers[drafter], answers["plain"], strict=True)
            figures["times plain"] = statistics.median(ratios)
            figures["identical"] = statistics.mean(one.token_ids == other.token_ids for one, other in pairs)
        part, how = ("speed", "one request") if batch == 1 else ("batch", f"batch {batch}, prompts too")
        rate, case = statistics.median(rates[drafter]), f"{drafter}, budget {args.budget}, {how}"
        yield Row(part=part, model=llm.info.name, case=case, tokens_per_second=rate, figures=figures)
        llm.close()


def _llm(loaded: Loaded, drafter: str, budget: int | str, batch: int) -> LLM:
    """Create an LLM with request memory, since rounds repeat prompts."""
    return LLM.from_target(*loaded, drafter=drafter, budget=budget, max_batch=batch, memory="request")


def _decoding_seconds(stats: RequestStats) -> float:
    return stats.total_seconds - stats.prefill_seconds


def _about_trees(found: Sequence[RequestStats]) -> dict[str, float]:
    cycles = sum(stats.cycles for stats in found)
    tokens, drafted = (sum(getattr(stats, name) for stats in found) for name in ("output_tokens", "drafted_nodes"))
    return {"tau": tokens / cycles, "nodes": 1 + drafted / cycles}


def _tree(sequence: int, size: int, vocab_size: int) -> Segment:
    """Build a tree where node (i - 1) // 2 is the parent of node i, with logits of every node."""
    token_ids = [37 * node % vocab_size for node in range(size)]
    return Segment(sequence, token_ids, [-1, *((node - 1) // 2 for node in range(1, size))], size)


def _fill(target: NativeTarget, sequence: int, context: int) -> None:
    while (missing := context - target.length(sequence)) > 0:
        size = min(missing, PREFILL)
        target.forward([Segment(sequence, list(range(size)), chain_parents(size), 0)])
        target.keep(sequence, range(size))


def _read(run: Callable[[], ForwardOutput]) -> list[int]:
    return list(run().greedy_ids.tolist())


def _host_seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _device_seconds(run: Callable[[], object]) -> float:
    """Measure the device time. The device sleeps first, so that it does not wait for the host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return sorted(int(part) for part in text.split(","))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=names, help=f"some of {','.join(PARTS)}; default: all that have what they need")
    parser.add_argument("--shapes", type=names, default=["135M", "1.5B", "8B"], help=f"some of {','.join(SHAPES)}")
    parser.add_argument("--sizes", type=numbers, default=[1, 8, 16, 32, 64, 128], help="positions per pass")
    parser.add_argument("--contexts", type=numbers, default=[1024, 8192])
    parser.add_argument("--repeats", type=int, default=50, help="repeats per pass and clock")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--quantize", choices=QUANTIZE, help="8-bit weight format")
    parser.add_argument("--exact", action="store_true", help="passes with the same bits for a row in every pass")
    parser.add_argument("--model", help="a known name, a folder or a GGUF file")
    parser.add_argument("--data", help="prompts, as for draftwood bench; default: bundled")
    parser.add_argument("--tasks", type=names, default=[], help="tasks; default: all")
    parser.add_argument("--limit", type=int, default=8, help="prompts per task")
    parser.add_argument("--drafters", type=names, default=["plain", "sam", "goose"])
    parser.add_argument("--budget", type=lambda text: text if text == "auto" else int(text), default="auto")
    parser.add_argument("--batch", type=int, default=32, help="batch size of the part batch")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3, help="runs per prompt")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="write all figures to a JSON file")
    args = parser.parse_args(argv)
    args.parts = args.parts or [*PASSES, *(RUNS if args.model else ())]
    return args


def check(args: argparse.Namespace) -> torch.device:
    """Choose the device and check the arguments before anything is loaded."""
    for what, given, allowed in (("part", args.parts, PARTS), ("shape", args.shapes, tuple(SHAPES))):
        if unknown := [name for name in given if name not in allowed]:
            raise OptionError(f"There is no such {what}", got=", ".join(unknown), allowed=allowed)
    if min(args.repeats, args.rounds, args.batch) < 1:
        raise OptionError("--repeats, --rounds and --batch count something", allowed="1 or more")
    if min(args.sizes) < 1 or min(args.contexts) < 0 or max(args.contexts) + max(args.sizes) > CONTEXT_LENGTH:
        raise OptionError("A pass has positions and fits into a context", allowed=f"up to {CONTEXT_LENGTH} in all")
    if any(part in RUNS for part in args.parts) and not args.model:
        raise OptionError(f"{', '.join(RUNS)} run a model", next_step="Name one: --model FOLDER.")
    large = [name for name in args.shapes if name != TINY] if any(part in PASSES for part in args.parts) else []
    if args.device == "auto" and not torch.cuda.is_available() and (large or args.model not in (None, TINY)):
        raise CapabilityError(
            "There is no GPU here",
            got=f"shapes {', '.join(args.shapes)}" + (f", model {args.model}" if args.model else ""),
            next_step="Try it with --shapes tiny (and --model tiny), or wait for a CPU with --device cpu.",
        )
    return pick_device(args.device)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        device = check(args)
        report = Report(args.out)
        try:
            if any(part in PASSES for part in args.parts):
                run_passes(args, device, report)
            if any(part in RUNS for part in args.parts):
                run_model(args, report)
        finally:  # show the results up to an error
            print("\n".join(report.lines()) if report.rows else "", flush=True)
    except DraftwoodError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
