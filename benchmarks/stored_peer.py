"""Perplexity of a GGUF file as it runs here beside llama.cpp on the same file and tokens.

    python benchmarks/stored_peer.py model.gguf --texts PROMPTS.jsonl --llamacpp PYTHON

``--llamacpp`` is a Python with ``xllamacpp``. Its server returns the most likely tokens only: positions whose next
token is not among them are left out on both sides and counted.
"""

import argparse
import json
import math
import subprocess
import tempfile
from pathlib import Path

from draftwood.config import ModelOptions
from draftwood.targets.load import load_target
from draftwood.targets.native.target import NativeTarget
from stored_quality import SKIPPED, log_probabilities

WORKER = """
import http.client, json, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.verbosity, params.n_gpu_layers = sys.argv[1], 1024, 1, 1, 0
for threads in (params.cpuparams, params.cpuparams_batch):
    threads.n_threads = 1
server = xllamacpp.Server(params)
print("ready", flush=True)
for line in sys.stdin:
    ids, most = json.loads(line)
    body = {"prompt": ids[:-1], "n_predict": 1, "n_probs": most, "cache_prompt": True, "ignore_eos": False}
    connection = http.client.HTTPConnection(server.listening_address.removeprefix("http://"))
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    top = answer["completion_probabilities"][0]["top_logprobs"]
    found = [entry["logprob"] for entry in top if entry["id"] == ids[-1]]
    print("found", found[0] if found else "none", flush=True)
"""


def main() -> None:
    options = parse_arguments()
    target, codec = load_target(ModelOptions(model=options.file, device="cpu", cache_tokens=4096))
    assert isinstance(target, NativeTarget), "a native model is needed"
    texts = [json.loads(line)["turns"][0] for line in options.texts.read_text(encoding="utf-8").splitlines()]
    peer = start_peer(options.llamacpp, options.file)
    ours_loss = peer_loss = 0.0
    count = left_out = 0
    for text in texts[: options.limit]:
        ids = codec.encode(text)[: options.tokens]
        ours = log_probabilities(target, ids)
        for position in range(SKIPPED, len(ids) - 1):
            found = ask(peer, ids[: position + 2], options.most)
            if found is None:
                left_out += 1
                continue
            ours_loss -= float(ours[position, ids[position + 1]])
            peer_loss -= found
            count += 1
    here, there = math.exp(ours_loss / count), math.exp(peer_loss / count)
    print(f"{count} tokens, {left_out} left out: perplexity {here:.4f}, llama.cpp {there:.4f}: {here / there - 1:+.2%}")


def start_peer(python: str, file: Path) -> "subprocess.Popen[str]":
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as script:
        script.write(WORKER)
    peer = subprocess.Popen([python, script.name, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert peer.stdout is not None
    while peer.stdout.readline().strip() != "ready":
        pass
    return peer


def ask(peer: "subprocess.Popen[str]", ids: list[int], most: int) -> float | None:
    """Returns the log probability of the last id after the others; None if it is not among the most likely."""
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.write(json.dumps([ids, most]) + "\n")
    peer.stdin.flush()
    while not (line := peer.stdout.readline()).startswith("found"):
        assert line, "llama.cpp ended"
    word = line.split()[1]
    return None if word == "none" else float(word)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--texts", type=Path, required=True, help="JSON lines with turns")
    parser.add_argument("--llamacpp", metavar="PYTHON", required=True)
    parser.add_argument("--limit", type=int, default=8, help="texts")
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    parser.add_argument("--most", type=int, default=2000, help="likely tokens per position")
    return parser.parse_args()


if __name__ == "__main__":
    main()
