"""Checks an exported head in vLLM: its acceptance must equal that in Draftwood.

    draftwood bench peers --install vllm
    python benchmarks/vllm_head.py HEAD --prompts gsm8k.jsonl --limit 20 --out vllm-head.json

Both engines draft a chain of three tokens, greedily, with the same weights, dtype and prompt ids. Acceptance at a
position is defined as in vLLM: the share of all drafts whose token there was accepted. vLLM first drafts after one
output token and counts the last draft completely; Draftwood is counted the same way. The cycles are then identical, and
if the texts are equal, a difference is caused by the head: its taps, a norm, or the vocabulary map. The exit code is 1
if a difference exceeds ``--tolerance``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftwood import LLM, SamplingParams
from draftwood.bench.peers import explain_absence, find_peer
from draftwood.bench.peers.environments import clean_environment, find_python, python_variable
from draftwood.bench.records.machine import describe_machine, list_versions
from draftwood.cli.console.terminal import Screen
from draftwood.errors import DraftwoodError, OptionError
from draftwood.models.find import resolve
from draftwood.progress import Progress
from draftwood.prompts import prompt_ids, read_prompts

WORKER = Path(__file__).with_name("vllm_head_worker.py")
LOG_LINES = 12  # shown when a program fails


@dataclass(kw_only=True)
class Acceptance:
    """Acceptance counts of one engine."""

    drafts: int
    accepted: list[int]  # drafts whose token at position 1, 2, ... was accepted
    texts: list[list[int]]  # outputs

    @property
    def rates(self) -> list[float]:
        return [count / self.drafts if self.drafts else 0.0 for count in self.accepted]


def export(head: str, folder: Path, model: str, progress: Progress) -> None:
    """Export with the draftwood command, which is under test."""
    progress("exporting the head", 0, 1)
    command = [
        sys.executable,
        "-m",
        "draftwood",
        "export",
        head,
        "--out",
        str(folder),
        "--to",
        "vllm",
        "--model",
        model,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DraftwoodError("The head was not exported", got=_last_lines(done.stderr))


def run_vllm(request: dict[str, Any], folder: Path, progress: Progress) -> dict[str, Any]:
    """Run the worker in vLLM's environment and return its reply."""
    python = find_python(find_peer("vllm"))
    given, log = folder / "request.json", folder / "log.txt"
    given.write_text(json.dumps(request), encoding="utf-8")
    environment = {**clean_environment(), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    answer = None
    with log.open("wb") as said:
        command = [str(python), str(WORKER), str(given)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                content = _message(line)
                if "progress" in content:
                    progress(*content["progress"])
                answer = content.get("answer", answer)
            process.wait()
        finally:
            process.kill()  # on Ctrl-C; no effect after its end
            process.wait()
    if answer is None:
        text = _last_lines(log.read_text(encoding="utf-8", errors="replace"))
        raise DraftwoodError(f"vLLM failed: {_how(process.returncode)}", got=text)
    return dict(answer)


def _message(line: str) -> dict[str, Any]:
    """Parse a line; empty if it is not a message of the worker."""
    with contextlib.suppress(ValueError):
        content = json.loads(line)
        if isinstance(content, dict):
            return content
    return {}


def _how(code: int) -> str:
    """Describe how a process ended, including signals."""
    return signal.strsignal(-code) or f"signal {-code}" if code < 0 else f"exit code {code}"


def _last_lines(text: str) -> str:
    return "\n".join([line for line in text.splitlines() if line.strip()][-LOG_LINES:])


def vllm_acceptance(answer: dict[str, Any]) -> Acceptance:
    if not answer.get("drafts"):
        raise DraftwoodError("vLLM drafted nothing", got=f"vLLM {answer['version']}")
    accepted = [int(count) for count in answer["accepted_tokens_per_pos"]]
    return Acceptance(drafts=int(answer["drafts"]), accepted=accepted, texts=answer["texts"])


def our_acceptance(llm: LLM, prompts: Sequence[list[int]], args: argparse.Namespace, progress: Progress) -> Acceptance:
    total = Acceptance(drafts=0, accepted=[0] * args.draft_tokens, texts=[])
    for done, prompt in enumerate(prompts):
        progress("draftwood", done, len(prompts))
        total.texts.append(_answer(llm, prompt, args.max_tokens, total))
    progress("draftwood", len(prompts), len(prompts))
    return total


def _answer(llm: LLM, prompt: list[int], max_tokens: int, total: Acceptance) -> list[int]:
    """Generate one output and add its drafts to ``total``. Runs past the end, so that the last draft is complete."""
    ends = set(llm.info.eos_token_ids)
    [first] = llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True), drafter="plain")[0].token_ids
    text = [first]
    more = SamplingParams(max_tokens=max_tokens + len(total.accepted), ignore_eos=True)
    with contextlib.closing(llm.stream([*prompt, first], more)) as events:
        while len(text) < max_tokens and not ends.intersection(text):
            event = next(events)
            total.drafts += 1
            for depth in range(len(event.path) - 1):  # the first of a path is the root
                total.accepted[depth] += 1
            text += event.token_ids
    end = next((place for place, token in enumerate(text) if token in ends), len(text))
    return text[: min(end + 1, max_tokens)]


def difference(theirs: float, ours: float) -> float:
    """Difference relative to Draftwood."""
    if theirs == ours:
        return 0.0
    return abs(theirs - ours) / ours if ours else float("inf")


def parted(theirs: Sequence[int], ours: Sequence[int]) -> int | None:
    """Return the first difference of two texts; None if they are equal."""
    if list(theirs) == list(ours):
        return None
    pairs = enumerate(zip(theirs, ours, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(theirs), len(ours)))


def show(vllm: Acceptance, ours: Acceptance, differences: Sequence[float], partings: Sequence[int | None]) -> None:
    print("| position | vLLM | draftwood | difference |\n| --- | --- | --- | --- |")
    for place, (theirs, own, apart) in enumerate(zip(vllm.rates, ours.rates, differences, strict=True), start=1):
        print(f"| {place} | {theirs:.4f} | {own:.4f} | {apart:.2%} |")
    passes = [1 + sum(one.rates) for one in (vllm, ours)]
    print(f"| tokens per pass | {passes[0]:.3f} | {passes[1]:.3f} | {difference(*passes):.2%} |")
    print(f"| drafts | {vllm.drafts} | {ours.drafts} | |")
    print(f"\n{partings.count(None)} of {len(partings)} texts are equal")
    for number, parting in enumerate(partings, start=1):
        if parting is not None:
            print(f"  prompt {number}: equal up to token {parting}")


def verdict(ours: Acceptance, *, proven: bool) -> str:
    if not ours.accepted[0]:
        return "nothing was accepted, so nothing is shown: take prompts like those that the head was trained on"
    return "the same head" if proven else "NOT the same head"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", metavar="HEAD", help="folder of an EAGLE-3 head, or name of a bundled head")
    parser.add_argument("--prompts", required=True, metavar="FILE", help="prompt file, see draftwood.prompts")
    parser.add_argument("--limit", type=int, default=20, help="number of prompts (default: 20)")
    parser.add_argument("--max-tokens", type=int, default=96, help="maximum number of output tokens (default: 96)")
    parser.add_argument("--draft-tokens", type=int, default=3, help="draft length (default: 3)")
    parser.add_argument("--model", default="smollm2", help="target model of the head (default: smollm2)")
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="dtype (default: float32)")
    parser.add_argument("--batch", type=int, default=8, help="batch size in vLLM (default: 8)")
    parser.add_argument(
        "--tolerance", type=float, default=0.05, help="maximum relative difference per position (default: 0.05)"
    )
    parser.add_argument(
        "--vllm-python", metavar="FILE", help="a Python with vllm (default: the one of draftwood bench peers)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures and texts to a JSON file")
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    """Check the arguments before anything is loaded."""
    for name, least in (("limit", 1), ("max_tokens", 2), ("draft_tokens", 1), ("batch", 1)):
        if getattr(args, name) < least:
            option = "--" + name.replace("_", "-")
            raise OptionError(f"{option} is too small", got=getattr(args, name), allowed=f"{least} or more")
    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise OptionError("There is no such folder", got=args.out.absolute().parent)
    if args.vllm_python:
        os.environ[python_variable("vllm")] = args.vllm_python
    if why := explain_absence(find_peer("vllm")):
        raise DraftwoodError(why)


def measure(args: argparse.Namespace, progress: Progress) -> tuple[str, Acceptance, Acceptance]:
    """Return the version of vLLM and the acceptance counts of both engines."""
    options = {"head": args.head, "growth": "chain", "depth": args.draft_tokens, "quantize": False}  # as in vLLM
    budget = args.draft_tokens + 1  # includes the root
    conversations = read_prompts(args.prompts, args.limit)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        export(args.head, folder / "head", args.model, progress)
        llm = LLM(
            args.model,
            drafter="eagle3",
            drafter_options=options,
            budget=budget,
            dtype=args.dtype,
            max_batch=1,
            progress=progress,
        )
        with llm:
            prompts = [prompt_ids(llm.tokenizer, conversation) for conversation in conversations]
            ours = our_acceptance(llm, prompts, args, progress)
        request = {
            "model": str(resolve(args.model).path),
            "head": str(folder / "head"),
            "prompts": prompts,
            "max_context": max(map(len, prompts)) + args.max_tokens + 2 * budget,
            **{name: getattr(args, name) for name in ("dtype", "batch", "max_tokens", "draft_tokens")},
        }
        answer = run_vllm(request, folder, progress)
    return answer["version"], vllm_acceptance(answer), ours


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    screen = Screen("auto")
    try:
        check(args)
        version, vllm, ours = measure(args, screen.progress)
    except DraftwoodError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    differences = [difference(*pair) for pair in zip(vllm.rates, ours.rates, strict=True)]
    partings = [parted(*pair) for pair in zip(vllm.texts, ours.texts, strict=True)]
    show(vllm, ours, differences, partings)
    proven = max(differences) <= args.tolerance and ours.accepted[0] > 0
    print(f"vLLM {version}, {args.dtype}: {verdict(ours, proven=proven)}")
    if args.out is not None:
        engines = {name: {**asdict(one), "rates": one.rates} for name, one in (("vllm", vllm), ("draftwood", ours))}
        facts = {"argv": sys.argv[1:], "machine": describe_machine(), "software": list_versions(), "vllm": version}
        content = {**facts, "engines": engines, "differences": differences, "partings": partings, "proven": proven}
        args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if proven else 1


if __name__ == "__main__":
    sys.exit(main())
