"""Compares plain decoding of the native target, transformers and llama.cpp, interleaved in one run.

    python benchmarks/plain_decoding.py                                 # ours and transformers, bfloat16
    python benchmarks/plain_decoding.py --gguf MODEL.gguf               # llama.cpp too (pip install xllamacpp)
    python benchmarks/plain_decoding.py --gguf MODEL.gguf --llama-python OTHER_ENV/bin/python

Every engine runs in its own process and sleeps while the others work. Each round runs the same prompt on all engines.
The table shows the median tokens per second without prefill, and the ratio to Draftwood in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

PROMPTS = [
    "Explain how a bicycle stays upright.",
    "Write a Python function that merges two sorted lists.",
    "List five facts about the river Danube.",
    "Tell a short story about a lighthouse keeper.",
    "What is the difference between weather and climate?",
]
Generate = Callable[[str, int], float]  # prompt, tokens -> tokens per second after the prompt


def draftwood_engine(args: argparse.Namespace) -> Generate:
    from draftwood import LLM, SamplingParams

    llm = LLM(args.model, drafter="plain", dtype=args.dtype, max_batch=1, device="cpu")

    def generate(prompt: str, tokens: int) -> float:
        messages = [{"role": "user", "content": prompt}]
        return llm.chat(messages, SamplingParams(max_tokens=tokens, ignore_eos=True))[0].stats.tokens_per_second

    return generate


def transformers_engine(args: argparse.Namespace) -> Generate:
    import torch
    import transformers

    from draftwood.models.find import resolve

    folder = resolve(args.model).path
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.transformers_dtype))
    model.eval()

    class Clock(transformers.LogitsProcessor):
        """Records the time of the first token: everything before is prefill."""

        started = 0.0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.started = self.started or time.perf_counter()
            return scores

    def generate(prompt: str, tokens: int) -> float:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        clock = Clock()
        with torch.inference_mode():
            model.generate(
                **ids, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, logits_processor=[clock]
            )
        return (tokens - 1) / (time.perf_counter() - clock.started)

    return generate


def llama_engine(args: argparse.Namespace) -> Generate:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = args.gguf
    params.n_ctx = 2048
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    server = xllamacpp.Server(params)

    def generate(prompt: str, tokens: int) -> float:
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        answer = server.handle_completions(
            {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        )
        return float(answer["timings"]["predicted_per_second"])

    return generate


ENGINES = {"draftwood": draftwood_engine, "transformers": transformers_engine, "llama.cpp": llama_engine}


def work(args: argparse.Namespace) -> None:
    """Worker: reads one JSON request per line, writes one figure per line."""
    generate = ENGINES[args.worker](args)
    for line in sys.stdin:
        request = json.loads(line)
        print("\nRATE", generate(request["prompt"], request["tokens"]), flush=True)


class Worker:
    def __init__(self, name: str, args: argparse.Namespace) -> None:
        python = args.llama_python if name == "llama.cpp" else sys.executable
        command = [python, __file__, "--worker", name, "--model", args.model, "--dtype", args.dtype]
        command += ["--threads", str(args.threads), "--transformers-dtype", args.transformers_dtype]
        command += [*(["--gguf", args.gguf] if args.gguf else [])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, prompt: str, tokens: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("RATE"):
                return float(line.split()[1])
        raise SystemExit("a worker ended without an answer: run it alone with --worker NAME to see why")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--transformers-dtype",
        default="float32",
        choices=["bfloat16", "float32"],
        help="float32 is faster on CPUs without bfloat16 support",
    )
    parser.add_argument("--gguf", help="the model's GGUF file, for llama.cpp")
    parser.add_argument("--llama-python", default=sys.executable, help="a Python with xllamacpp")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2, help="runs per prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    names = [name for name in ENGINES if name != "llama.cpp" or args.gguf]
    workers = {name: Worker(name, args) for name in names}
    rates: dict[str, list[float]] = {name: [] for name in names}
    for worker in workers.values():
        worker.ask(PROMPTS[0], 16)  # loads and warms up
    for turn in range(args.rounds):
        for number, prompt in enumerate(PROMPTS):
            print(f"\rround {turn + 1}/{args.rounds}, prompt {number + 1}/{len(PROMPTS)} ", end="", file=sys.stderr)
            for name, worker in workers.items():
                rates[name].append(worker.ask(prompt, args.tokens))
    print(file=sys.stderr)
    for worker in workers.values():
        worker.close()
    print(f"{args.model}, {args.dtype} (transformers: {args.transformers_dtype}), {args.tokens} tokens, greedy")
    print(f"{args.threads} threads, {platform.machine()}")
    print("| engine | tokens/s, median | draftwood is |\n| --- | --- | --- |")
    for name in names:
        ratio = statistics.median(a / b for a, b in zip(rates["draftwood"], rates[name], strict=True))
        print(f"| {name} | {statistics.median(rates[name]):.1f} | {ratio:.2f}x |")


if __name__ == "__main__":
    main()
