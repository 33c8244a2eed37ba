"""Measures the time per cycle of drafting with an EAGLE-3 head, and of verifying its trees.

    python benchmarks/draft_time.py --shapes 8B,1.5B --out draft.json
    python benchmarks/draft_time.py --shapes 8B --eager                 # the head launch by launch
    python benchmarks/draft_time.py --shapes tiny                       # on any machine

Target and head are random, with the shapes of real models. The head's logits are scaled until its best token has about
the probability of a trained head. Cycles are those of the engine: a tree is drafted and verified, and a path is
accepted, each node with the probability that the head gave it. The next draft continues with the accepted tokens.

``draft`` is the time of ``propose`` and ``observe``: ``passes`` runs of the head take ``pass`` each, the rest is
``host`` (tree growth, bookkeeping). A head that grows a tree by itself counts as one pass. The device starts it right
after the target's pass, so what counts is how long it still takes once the host has the target's answer. With
``--waits`` it starts only then.
``device`` is the GPU time of the last single pass when replayed alone. All figures are medians over cycles in ms; the
policies take turns, with some cycles each.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftwood import SamplingParams
from draftwood.bench.records.machine import describe_machine, list_versions
from draftwood.drafters import DraftRequest, PromptRows, VerifiedTree
from draftwood.drafters.heads import Eagle3Drafter
from draftwood.drafters.neural import NeuralDrafter
from draftwood.drafters.neural_options import MAX_NODES, NeuralOptions
from draftwood.errors import CapabilityError, DraftwoodError, OptionError
from draftwood.sources.neural.build import make_head_model
from draftwood.sources.neural.head import EagleModel, HeadModel
from draftwood.targets.base import ForwardOutput, Segment, chain_parents
from draftwood.targets.load import pick_device
from draftwood.targets.native.target import NativeTarget
from draftwood.tree import DraftTree
from gpu_shapes import SHAPES, make_sure, new_head, random_target

TINY = "tiny"
CHUNK = 512
GROWTHS = {
    "chain": NeuralOptions(growth="chain"),
    "beam": NeuralOptions(growth="beam", top_k=10, depth=7),
    "optimal": NeuralOptions(growth="optimal", top_k=10, batch=10),
    "salf": NeuralOptions(growth="salf", top_k=10, batch=10, threshold=0.6),
}
AHEAD_CYCLES = 2_000_000  # sleep, so that the host issues the work before the device starts it
REPLAYS = 30
MAX_CYCLES = 1000
AT_ONCE = 10  # cycles of a policy: between them other drafts would run
MAX_EMITTED = 16  # mean tokens per cycle


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One growth policy on one shape; times in ms."""

    shape: str
    growth: str
    nodes: float
    tokens: float  # emitted per cycle
    passes: float
    pass_ms: float
    device_ms: float | None
    host_ms: float
    draft_ms: float
    verify_ms: float

    @property
    def share(self) -> float:
        return self.draft_ms / self.verify_ms


class Clock:
    """Counts and times calls of a function that return something."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.calls, self.seconds = 0, 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            result = function(*args)
            if result is not None:
                self.seconds += time.perf_counter() - started
                self.calls += 1
            return result

        return timed


@dataclass(frozen=True, kw_only=True, slots=True)
class Cycle:
    nodes: int
    tokens: int
    passes: int
    pass_seconds: float
    draft_seconds: float
    verify_seconds: float


class Request:
    """A text that grows in cycles, known to a target and a draft model."""

    def __init__(self, target: NativeTarget, drafter: NeuralDrafter, passes: Clock, args: argparse.Namespace) -> None:
        self._target = target
        self._drafter = drafter
        self._passes = passes
        self._budget = args.budget
        self._waits = args.waits
        self._rng = random.Random(0)
        vocabulary = range(target.info.vocab_size)
        prompt = self._rng.choices(vocabulary, k=args.context + 1)  # the last one is the root
        params = SamplingParams(max_tokens=args.room)
        self._drafter.begin(DraftRequest(prompt, params, np.random.default_rng(0)))
        self._sequence = target.open(args.context + args.room + MAX_NODES)
        for start in range(0, args.context, CHUNK):
            tokens = prompt[start : min(start + CHUNK, args.context)]
            output = self._run(tokens, chain_parents(len(tokens)), 0)
            self._target.keep(self._sequence, range(len(tokens)))
            self._drafter.read_prompt(PromptRows(start, output.logits, taps=output.taps))

    def cycle(self) -> Cycle:
        self._passes.reset()
        started = time.perf_counter()
        tree = self._drafter.propose(self._budget)
        drafted = time.perf_counter() - started
        path = self._accepted(tree)
        emitted = [*(tree.tokens[node] for node in path[1:]), self._rng.randrange(self._target.info.vocab_size)]
        on_device = self._choices(tree, path, emitted)
        started = time.perf_counter()
        flight = self._target.launch([Segment(self._sequence, tree.tokens, tree.parents, len(tree))])
        answer = None if self._waits else flight.on_device()
        if answer is not None:
            self._drafter.draft_ahead(answer._replace(choices=on_device), self._budget)
        output = flight.wait()
        choices = output.greedy_ids.tolist()
        verified = time.perf_counter() - started
        self._target.keep(self._sequence, path)
        started = time.perf_counter()
        self._drafter.observe(VerifiedTree(tree, output.logits, choices, path, emitted, output.taps))
        drafted += time.perf_counter() - started
        return Cycle(
            nodes=len(tree),
            tokens=len(emitted),
            passes=self._passes.calls,
            pass_seconds=self._passes.seconds,
            draft_seconds=drafted,
            verify_seconds=verified,
        )

    def _run(self, tokens: Sequence[int], parents: Sequence[int], num_logits: int) -> ForwardOutput:
        self._target.set_taps(self._drafter.wants_taps)
        return self._target.forward([Segment(self._sequence, tokens, parents, num_logits)])

    def _choices(self, tree: DraftTree, path: Sequence[int], emitted: Sequence[int]) -> torch.Tensor:
        """What the target would have chosen after each node, [MAX_NODES, 1]: in place of what random weights choose."""
        choices = torch.full((MAX_NODES, 1), -1, dtype=torch.int32)
        choices[list(path), 0] = torch.tensor(emitted, dtype=torch.int32)
        return choices.to(self._target.info.device)

    def _accepted(self, tree: DraftTree) -> list[int]:
        """Choose a path from the root: a child is taken with the head's probability."""
        path, children = [0], tree.children()
        while True:
            chance = self._rng.random()
            for child in children[path[-1]]:
                chance -= tree.probs[child]
                if chance < 0.0:
                    path.append(child)
                    break
            else:
                return path

    def close(self) -> None:
        self._drafter.end()
        self._target.close(self._sequence)


def measure(name: str, args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    _tell(f"{name}: making weights")
    dtype = getattr(torch, args.dtype)
    slots = len(args.growths) * (args.context + args.room + MAX_NODES)
    target = random_target(name, dtype, device, slots)
    head = new_head(target)
    _tell(f"{name}: the head's best token has the probability {make_sure(head, target):.2f} on the average")
    taps = head.config.taps_for(target.info.num_layers)
    more = 2 * slots
    quantize = not args.dense
    model: HeadModel
    if args.eager:
        model = EagleModel(head, taps, more)
    else:
        model = make_head_model(head, target.info.num_layers, more, quantize=quantize)
    passes = Clock()
    model.forward = passes.around(model.forward)  # type: ignore[method-assign]
    model.grow = passes.around(model.grow)  # type: ignore[method-assign]
    start_ahead = model.start_ahead

    def start(*given: Any) -> Any:
        search = start_ahead(*given)
        return None if search is None else passes.around(search)

    model.start_ahead = start  # type: ignore[method-assign]
    requests: dict[str, Request] = {}
    for growth in args.growths:
        options = GROWTHS[growth]
        drafter = Eagle3Drafter(options, Eagle3Drafter.make_shared(model, options, target.info))
        requests[growth] = Request(target, drafter, passes, args)
    found: dict[str, list[Cycle]] = {growth: [] for growth in requests}
    on_device: dict[str, float | None] = {}
    _tell(f"{name}: {args.warm_up} + {args.cycles} cycles, {type(model).__name__}, {target.info.backend}")
    total = args.warm_up + args.cycles
    for first in range(0, total, AT_ONCE):
        for growth, request in requests.items():
            for number in range(first, min(first + AT_ONCE, total)):
                made = request.cycle()
                if number >= args.warm_up:
                    found[growth].append(made)
            if first + AT_ONCE >= total:
                on_device[growth] = device_ms(model)
    for growth, request in requests.items():
        request.close()
        yield _row(name, growth, found[growth], on_device[growth])


def _row(name: str, growth: str, cycles: Sequence[Cycle], on_device: float | None) -> Row:
    def median_ms(seconds: Iterator[float]) -> float:
        return 1e3 * statistics.median(seconds)

    return Row(
        shape=name,
        growth=growth,
        nodes=statistics.mean(cycle.nodes for cycle in cycles),
        tokens=statistics.mean(cycle.tokens for cycle in cycles),
        passes=statistics.mean(cycle.passes for cycle in cycles),
        pass_ms=median_ms(cycle.pass_seconds / max(cycle.passes, 1) for cycle in cycles),
        device_ms=on_device,
        host_ms=median_ms(cycle.draft_seconds - cycle.pass_seconds for cycle in cycles),
        draft_ms=median_ms(cycle.draft_seconds for cycle in cycles),
        verify_ms=median_ms(cycle.verify_seconds for cycle in cycles),
    )


def device_ms(model: HeadModel) -> float | None:
    """Time the latest pass on the device by replaying its graph; None without a graph."""
    passes = getattr(getattr(model, "_decoder", None), "_passes", {})  # captured ones
    captured = next(reversed(passes.values()), None)
    graph = None if captured is None else captured.graph
    if graph is None:
        return None
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return statistics.median(times)


def table(rows: Sequence[Row]) -> str:
    lines = ["| shape | growth | nodes | tokens | passes | pass | device | host | draft | verify | draft / verify |"]
    lines.append("| --- | --- " + "| ---: " * 9 + "|")
    for row in rows:
        counts = (f"{row.nodes:.1f}", f"{row.tokens:.2f}", f"{row.passes:.1f}")
        device = "-" if row.device_ms is None else f"{row.device_ms:.3f}"
        times = [f"{ms:.3f}" for ms in (row.host_ms, row.draft_ms, row.verify_ms)]
        cells = (row.shape, row.growth, *counts, f"{row.pass_ms:.3f}", device, *times, f"{row.share:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=names, default=["8B"], help=f"some of {','.join(SHAPES)}")
    parser.add_argument("--growths", type=names, default=list(GROWTHS), help=f"some of {','.join(GROWTHS)}")
    parser.add_argument("--context", type=int, default=1024, help="positions before the first cycle")
    parser.add_argument("--budget", type=int, default=60, help="nodes per tree, root included")
    parser.add_argument("--cycles", type=int, help="cycles per growth policy; default: 100 on a GPU, else 10")
    parser.add_argument("--warm-up", type=int, default=10, help="untimed cycles, which compile and capture")
    dtypes = ("float32", "float16", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--waits", action="store_true", help="launch drafts only when the target has answered")
    parser.add_argument("--eager", action="store_true", help="run the head without CUDA graphs")
    parser.add_argument("--dense", action="store_true", help="do not quantize the head")
    parser.add_argument("--out", type=Path, help="write all figures to a JSON file")
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> torch.device:
    """Choose the device and check the arguments before anything is created."""
    for what, given, allowed in (("shape", args.shapes, tuple(SHAPES)), ("growth", args.growths, tuple(GROWTHS))):
        if unknown := [name for name in given if name not in allowed]:
            raise OptionError(f"There is no such {what}", got=", ".join(unknown), allowed=allowed)
    if args.context < 1 or args.warm_up < 0 or args.cycles not in (None, *range(1, MAX_CYCLES + 1)):
        raise OptionError("--context, --warm-up and --cycles count something", allowed=f"cycles: 1 to {MAX_CYCLES}")
    if not 2 <= args.budget <= MAX_NODES:
        raise OptionError("A tree has more than its root", got=f"--budget {args.budget}", allowed=f"2 to {MAX_NODES}")
    if args.device == "auto" and not torch.cuda.is_available() and set(args.shapes) != {TINY}:
        raise CapabilityError(
            "There is no GPU here",
            got=f"shapes {', '.join(args.shapes)}",
            next_step="Try it with --shapes tiny, or wait for a CPU with --device cpu.",
        )
    return pick_device(args.device)


def settle(args: argparse.Namespace, device: torch.device) -> None:
    """Set defaults that depend on the device and on other options."""
    on_gpu = device.type == "cuda"
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    args.cycles = args.cycles or (100 if on_gpu else 10)
    args.room = (args.warm_up + args.cycles) * MAX_EMITTED


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        device = check(args)
        settle(args, device)
        rows = [row for name in args.shapes for row in measure(name, args, device)]
    except DraftwoodError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(rows), flush=True)
    if args.out is not None:
        facts = {"argv": sys.argv[1:], "machine": describe_machine(), "software": list_versions()}
        content = {**facts, "rows": [{**asdict(row), "share": row.share} for row in rows]}
        args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
