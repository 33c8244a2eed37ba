"""CPU milliseconds per token of a GGUF file on one thread: as stored, in bfloat16, with a drafter, and in llama.cpp.

    python benchmarks/stored_decoding.py model.gguf --llamacpp PYTHON
    python benchmarks/stored_decoding.py model.gguf --data PROMPTS --limit 4 --tokens 96

Without ``--data``, plain decoding of one prompt, the engines in turns. ``--llamacpp`` is a Python with ``xllamacpp``.
With ``--data``, a folder of task files, the default drafter beside plain decoding of the file as stored.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from draftwood import LLM, SamplingParams
from draftwood.config import DEFAULT_DRAFTER

TASKS = ("humaneval", "mbpp", "classeval", "gsm8k", "mt_bench")
PROMPT = "Explain how rain forms, step by step."
WORKER = """
import http.client, json, sys, time
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.verbosity, params.n_gpu_layers = sys.argv[1], 1024, 1, 1, 0
params.cache_ram_mib = 0
for threads in (params.cpuparams, params.cpuparams_batch):
    threads.n_threads = 1
server = xllamacpp.Server(params)
print("ready", flush=True)
for line in sys.stdin:
    start = time.process_time()
    connection = http.client.HTTPConnection(server.listening_address.removeprefix("http://"))
    connection.request("POST", "/completion", line, {"Content-Type": "application/json"})
    connection.getresponse().read()
    connection.close()
    print("seconds", time.process_time() - start, flush=True)
"""


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    if options.data is None:
        compare_engines(options)
    else:
        compare_drafter(options)


def compare_engines(options: argparse.Namespace) -> None:
    llms = {dtype: LLM(options.file, device="cpu", dtype=dtype, max_batch=1) for dtype in ("auto", "bfloat16")}
    runs: dict[str, Callable[[int], float]] = {dtype: plain_run(llm) for dtype, llm in llms.items()}
    if options.llamacpp:
        runs["llama.cpp"] = llamacpp_run(options.llamacpp, options.file)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            short, long = run(1), run(options.tokens)
            times[name].append(1000 * (long - short) / (options.tokens - 1))
    for name, values in times.items():
        print(f"{name}: median {statistics.median(values):.2f} ms per token")


def plain_run(llm: LLM) -> Callable[[int], float]:
    def run(tokens: int) -> float:
        start = time.process_time()
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        llm.chat([{"role": "user", "content": PROMPT}], params, drafter="plain")
        return time.process_time() - start

    return run


def llamacpp_run(python: str, file: Path) -> Callable[[int], float]:
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as script:
        script.write(WORKER)
    peer = subprocess.Popen([python, script.name, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert peer.stdin is not None
    assert peer.stdout is not None
    given, answers = peer.stdin, peer.stdout
    while answers.readline().strip() != "ready":
        pass

    def run(tokens: int) -> float:
        prompt = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
        body = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "cache_prompt": False, "top_k": 1}
        given.write(json.dumps(body) + "\n")
        given.flush()
        while not (line := answers.readline()).startswith("seconds"):
            pass
        return float(line.split()[1])

    return run


def compare_drafter(options: argparse.Namespace) -> None:
    llm = LLM(options.file, device="cpu", max_batch=1)
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    llm.chat([{"role": "user", "content": PROMPT}], SamplingParams(max_tokens=16))  # measures costs, if it is the first
    speedups, same, count = [], 0, 0
    for task in TASKS:
        lines = (options.data / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
        spent = dict.fromkeys(("plain", options.drafter), 0.0)
        for prompt in [json.loads(line)["turns"][0][:2000] for line in lines[: options.limit]]:
            outputs = []
            for drafter in spent:
                start = time.process_time()
                answer = llm.chat([{"role": "user", "content": prompt}], params, drafter=drafter)[0]
                seconds, stats = time.process_time() - start, answer.stats
                spent[drafter] += seconds * (1 - stats.prefill_seconds / stats.total_seconds)
                outputs.append(answer.token_ids)
            same += outputs[0] == outputs[1]
            count += 1
        speedups.append(spent["plain"] / spent[options.drafter])
        print(f"{task}: {speedups[-1]:.2f}x", flush=True)
    print(f"mean {statistics.mean(speedups):.2f}x; {same} of {count} outputs equal those of plain decoding")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llamacpp", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--drafter", default=DEFAULT_DRAFTER)
    parser.add_argument("--limit", type=int, default=4, help="prompts of each task")
    return parser.parse_args()


if __name__ == "__main__":
    main()
