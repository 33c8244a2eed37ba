"""Tokens per second of drafters by fixed costs: the engine decides by a clock that only moves by known costs.

    python benchmarks/fixed_costs.py --data FOLDER plain sam goose blend goose@4 eagle3:growth=chain

The model runs and all decisions are the engine's own, but passes of the target and of a head, drafting and learning
take the times below on a virtual clock. So results do not depend on what else the machine does, and show whether sizes
and head passes are chosen well. Costs are those of SmolLM2 (Q4_1) on one core of a Xeon with AVX-512 and VNNI, or with
``--costs amx`` on one core of a Xeon with AMX, which runs the model from its third-level cache, or with ``--costs arm``
on two Neoverse-N1 cores, where further positions are dear, or with ``--costs h200`` on that GPU in bfloat16, where they
are cheap. On CPUs, more than 32 or 64 positions were not timed: their costs follow from those of fewer. Methods, tasks
and ratios are those of blend_tables.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def around(self, function: Callable[..., Any], seconds: Callable[..., float]) -> Callable[..., Any]:
        """The function, which takes this long by the clock."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds(*args)
            return function(*args, **kwargs)

        return timed


CLOCK = Clock()
time.perf_counter = lambda: CLOCK.now  # before anything imports it

import numpy as np  # noqa: E402
import torch  # noqa: E402

from blend_tables import TASKS, Key, Result, answer, describe, make_llm, read_prompts  # noqa: E402
from draftwood.config import ModelOptions  # noqa: E402
from draftwood.drafters import transition  # noqa: E402
from draftwood.engine import Engine  # noqa: E402
from draftwood.sizing import CostProfile, LiveCosts  # noqa: E402
from draftwood.targets import load_target  # noqa: E402

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
CONTEXTS = (0, 1000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Milliseconds."""

    passes: tuple[float, ...]  # of the target, by SIZES
    context: tuple[float, float] = (0.0, 0.0)  # for each 1,000 tokens: of a pass, and of each of its positions
    head_pass: float
    head_row: float  # further rows of a pass of the head
    cycle: float  # of the host, whatever the drafter
    draft: dict[str, float]
    learn: dict[str, float]


COSTS = {
    "avx512": Costs(
        passes=(10.7, 11.5, 12.2, 12.9, 14.5, 16.7, 21.0, 26.2, 37.0, 48.0, 70.0, 92.0, 136.0, 180.0),
        context=(2.5, 1.2),
        head_pass=1.3,
        head_row=0.1,
        cycle=0.5,
        draft={"sam": 0.10, "goose": 0.10, "blend": 0.14, "eagle3": 0.05},
        learn={"sam": 0.15, "goose": 0.25, "blend": 0.30, "eagle3": 0.15},
    ),
    "arm": Costs(
        passes=(5.4, 7.3, 9.3, 11.1, 14.9, 19.0, 29.2, 37.1, 55.8, 73.4, 109.9, 147.9, 222.0, 296.0),
        head_pass=1.0,
        head_row=0.2,
        cycle=0.25,
        draft={"sam": 0.12, "goose": 0.10, "blend": 0.14, "eagle3": 0.05},
        learn={"sam": 0.12, "goose": 0.13, "blend": 0.20, "eagle3": 0.12},
    ),
    "amx": Costs(
        passes=(5.5, 5.8, 6.1, 6.5, 7.4, 8.4, 11.3, 14.3, 21.0, 27.0, 41.0, 54.0, 81.0, 108.0),
        context=(4.3, 0.3),
        head_pass=1.2,
        head_row=0.06,
        cycle=0.3,
        draft={"sam": 0.08, "goose": 0.08, "blend": 0.12, "eagle3": 0.05},
        learn={"sam": 0.10, "goose": 0.10, "blend": 0.16, "eagle3": 0.15},
    ),
    "h200": Costs(
        passes=(0.60, 0.62, 0.63, 0.64, 0.65, 0.66, 0.67, 0.67, 0.70, 0.71, 0.74, 0.77, 0.97, 1.16),
        head_pass=0.055,
        head_row=0.0,
        cycle=0.14,
        draft={"sam": 0.03, "goose": 0.03, "blend": 0.05, "eagle3": 0.13},
        learn={"sam": 0.06, "goose": 0.06, "blend": 0.07, "eagle3": 0.02},
    ),
}


def seconds_of_pass(costs: Costs, target: Any, segments: Sequence[Any]) -> float:
    """Those of trees: the passes of prompts are not counted."""
    rows = sum(len(segment.token_ids) for segment in segments)
    context = sum(target.length(segment.sequence) for segment in segments) / len(segments)
    return seconds_after(costs, rows, context)


def seconds_after(costs: Costs, rows: int, context: float) -> float:
    per_pass, per_row = costs.context
    return (float(np.interp(rows, SIZES, costs.passes)) + (per_pass + per_row * rows) * context / 1e3) / 1e3


def seconds_of_head(costs: Costs, segments: Sequence[Any]) -> float:
    num_rows = sum(len(segment.token_ids) for segment, *_ in segments)
    return (costs.head_pass + costs.head_row * (num_rows - 1)) / 1e3


def charge_drafter(cls: Any, costs: Costs) -> None:
    """Drafting and learning of this class take time."""
    draft, learn = (own.get(cls.name, 0.0) / 1e3 for own in (costs.draft, costs.learn))
    charge(cls, ["propose_batch" if cls.drafts_in_batch else "propose"], draft)
    charge(cls, ["observe", "observe_batch"], learn)


def charge(cls: Any, names: Sequence[str], seconds: float) -> None:
    """These methods take time, once if one calls another."""
    running = list[str]()

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            CLOCK.now += 0.0 if running else seconds
            running.append(name)
            try:
                return method(*args)
            finally:
                running.pop()

        return run

    for name in names:
        method = getattr(cls, name)
        is_bound = hasattr(method, "__func__")  # to the class
        own = timed(name, method.__func__ if is_bound else method)
        setattr(cls, name, classmethod(own) if is_bound else own)


def prepare(method: str, loaded: Any, args: argparse.Namespace, costs: Costs) -> Any:
    llm = make_llm(method, loaded, args.memory)
    if "@" not in method:
        rows = tuple(tuple(seconds_after(costs, size, context) for size in SIZES) for context in CONTEXTS)
        llm.engine._costs = LiveCosts(CostProfile(SIZES, CONTEXTS, rows))  # before it times and stores any itself
        assert llm.engine.budget
    shared: Any = llm._default._shared
    for holder in (shared, getattr(shared, "head", None)):
        model = getattr(holder, "model", None)
        if model is not None:
            model.forward = CLOCK.around(model.forward, lambda segments, _: seconds_of_head(costs, segments))
    return llm


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", metavar="METHOD")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--skip", type=Path, metavar="FOLDER")
    parser.add_argument("--tasks", default=TASKS, help="separated by commas")
    parser.add_argument("--prompts", type=int, default=2, help="of each task")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--memory", default="process", help="who shares what drafters learn")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--costs", choices=COSTS, default="avx512")
    parser.add_argument("--lesson", type=float, help="tokens that a verified node is worth to later trees")
    args = parser.parse_args(argv, argparse.Namespace(samples=1, speed=True, whole=False))
    costs = COSTS[args.costs]
    transition.LESSON = transition.LESSON if args.lesson is None else args.lesson
    torch.set_num_threads(1)
    prompts = read_prompts(args)
    loaded = load_target(ModelOptions(model=args.model, max_batch=1))
    target: Any = loaded.target
    target.forward = CLOCK.around(target.forward, lambda segments: seconds_of_pass(costs, target, segments))
    Engine.step = CLOCK.around(Engine.step, lambda *_: costs.cycle / 1e3)  # type: ignore[method-assign]
    llms = {method: prepare(method, loaded, args, costs) for method in args.methods}
    for cls in {llm._default.cls for llm in llms.values()}:
        charge_drafter(cls, costs)
    found: dict[Key, Result] = {}
    for task, own in prompts.items():
        for number, prompt in enumerate(own):
            for method, llm in llms.items():
                found[method, task, number, args.temperature] = answer(llm, prompt, args)
    print(f"| tokens per second | {' | '.join(prompts)} | mean | ratio | positions | tokens per pass | ...")
    for method in args.methods:
        print(describe(method, found, prompts, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
