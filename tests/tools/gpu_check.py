"""Manual checks on a machine with a GPU.

    compute-sanitizer --tool memcheck python -m tests.tools.gpu_check --small     # also racecheck, initcheck
    python -m tests.tools.gpu_check --model MODEL [--drafter goose] [--dtype bfloat16] [--limit 4] [--max-tokens 256]

``--small`` takes a tiny model through a prompt and some cycles of random trees, and draws tokens after their nodes:
every kernel, few programs. Without it, greedy speculative output is compared with plain output on the prompts of the
package, as ``draftwood check`` does.
"""

# ruff: noqa: T201 - prints

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from functools import partial

from draftwood.bench.tasks.load import load_tasks
from draftwood.check import check
from draftwood.config import SamplingParams
from draftwood.llm import LLM
from draftwood.prompts import prompt_ids
from draftwood.sampling import Warper
from draftwood.targets.base import Draw, Segment
from tests.conftest import path_to, prefill, random_parents
from tests.tools.cuda import SMALL, copied, error, ids_of, new_target
from tests.tools.draws import NUMBERS, RULES

PROMPT = 70  # wider than our own kernels support
MAX_NODES = 20
TOLERANCE = 0.05


def run_cycles(cycles: int) -> bool:
    """Whether the resulting cache gives the same output as a fresh one."""
    target, rng = new_target(SMALL), random.Random(0)
    capacity = target.num_slots // 3
    target.set_top(10)
    texts = [ids_of(target, rng, PROMPT if capacity > 2 * PROMPT else 3), ids_of(target, rng, 2)]
    sequences = [prefill(target, text, capacity) for text in texts]
    for _ in range(cycles):
        segments = []
        for sequence in sequences:
            parents = random_parents(rng, rng.randint(1, MAX_NODES))
            rule = Warper(SamplingParams(**RULES[rng.choice(sorted(RULES))]), ()).rule
            draw = Draw(rule, partial(rng.choices, NUMBERS, k=len(parents)))
            segments.append(Segment(sequence, ids_of(target, rng, len(parents)), parents, len(parents), draw=draw))
        output = target.forward(segments)
        assert output.drawn is not None
        assert 0 <= int(output.drawn.min()) <= int(output.drawn.max()) < SMALL.vocab_size
        for text, segment in zip(texts, segments, strict=True):
            path = path_to(segment.parents, rng.randrange(len(segment.parents)))
            target.keep(segment.sequence, path)
            text += [segment.token_ids[node] for node in path]
    worst = 0.0
    for sequence, text in zip(sequences, texts, strict=True):
        fresh = prefill(target, text, len(text) + 1)
        ours, theirs = (copied(target.forward([Segment(which, [9], [-1], 1)])).logits for which in (sequence, fresh))
        worst = max(worst, error(ours, theirs))
        target.close(fresh)
    print(
        f"{cycles} cycles, {target.info.backend} on {target.info.device}: relative error {worst:.2g} (<= {TOLERANCE})"
    )
    return worst <= TOLERANCE


def run_check(args: argparse.Namespace) -> bool:
    """Whether all differences are numeric ties."""
    verdicts: Counter[str] = Counter()
    with LLM(args.model, drafter=args.drafter, dtype=args.dtype, device="cuda") as llm:
        print(f"{llm.info.name}, {llm.info.backend}, {llm.info.dtype}, {args.drafter}")
        for task in load_tasks((), None, args.limit):
            ids = [prompt_ids(llm.tokenizer, prompt.turns[0]) for prompt in task.prompts]
            for record in check(llm, ids, SamplingParams(max_tokens=args.max_tokens)):
                verdicts[record.verdict] += 1
                if record.difference is not None:
                    print(f"{task.name} {record.index + 1}: {record.verdict}, {record.difference}")
    print(", ".join(f"{verdicts[verdict]} {verdict}" for verdict in ("identical", "tie", "error")))
    return not verdicts["error"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.gpu_check", description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--cycles", type=int, default=30)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="goose")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each task")
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    return 0 if (run_cycles(args.cycles) if args.small else run_check(args)) else 1


if __name__ == "__main__":
    sys.exit(main())
