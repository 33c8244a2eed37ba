"""CPU time of the passes of an EAGLE-3 head on a CPU, in 4 bits and in float32, and what the head's trees bring.

    python benchmarks/head_passes.py smollm2 --data PROMPTS --tasks humaneval,gsm8k,mt_bench

One thread. Both forms of the head answer the same prompts, one prompt each in turn; outputs must be equal.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftwood import LLM, SamplingParams
from draftwood.sources.neural.base import DraftSegment
from draftwood.sources.neural.head import EagleModel
from draftwood.targets import TopRows

Times = dict[int, list[float]]  # milliseconds by rows of a pass


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    models = {
        "float32": LLM(options.model, drafter="eagle3", drafter_options={"quantize": False}, budget=options.budget),
        "4 bits": LLM(options.model, drafter="eagle3", budget=options.budget),
    }
    times: dict[str, Times] = {name: timed(llm) for name, llm in models.items()}
    seconds, tokens, cycles = (dict.fromkeys(models, 0.0) for _ in range(3))
    params = SamplingParams(max_tokens=options.tokens)
    for task in options.tasks:
        lines = (options.data / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()[: options.limit]
        for prompt in [json.loads(line)["turns"][0] for line in lines]:
            texts = set()
            for name, llm in models.items():
                start = time.process_time()
                answer = llm.generate(prompt, params)[0]
                seconds[name] += time.process_time() - start
                tokens[name] += answer.stats.output_tokens
                cycles[name] += answer.stats.cycles
                texts.add(answer.text)
            assert len(texts) == 1, "outputs differ"
    print("| rows |", " | ".join(f"{name}, ms" for name in models), "|")
    print("| --- " * (1 + len(models)) + "|")
    for rows in sorted(set.intersection(*(set(each) for each in times.values()))):
        if all(len(each[rows]) >= options.least for each in times.values()):
            print(f"| {rows} |", " | ".join(f"{statistics.median(each[rows]):.2f}" for each in times.values()), "|")
    for name in models:
        print(f"{name}: {tokens[name] / cycles[name]:.2f} tokens per pass, {seconds[name]:.1f} s of CPU time in all")


def timed(llm: LLM) -> Times:
    """Measures every pass of the head from now on."""
    model: Any = llm._default._shared.model
    assert isinstance(model, EagleModel)
    times: Times = defaultdict(list)
    forward = model.forward

    def measured(segments: Sequence[DraftSegment], k: int) -> TopRows:
        start = time.thread_time()
        top = forward(segments, k)
        times[sum(len(segment.token_ids) for segment, *_ in segments)].append((time.thread_time() - start) * 1000)
        return top

    model.forward = measured  # type: ignore[method-assign]
    return times


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--data", type=Path, required=True, help="folder with JSON lines per task")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=["humaneval", "gsm8k", "mt_bench"])
    parser.add_argument("--limit", type=int, default=5, help="prompts per task")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--least", type=int, default=20, help="passes of a size, to be shown")
    return parser.parse_args()


if __name__ == "__main__":
    main()
