"""Measures structured output: tokens per pass and CPU time per token, plain and drafted, with and without a schema.

    python benchmarks/structured.py
    python benchmarks/structured.py --drafter blend --budget auto --max-tokens 200 --rounds 9

Answers are greedy, on one thread. Masked answers must be the same in all modes, and validate if they end. All modes run
prompt by prompt in turn; the time of a prompt in a mode is its least CPU time over all rounds, prefill included.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

from draftwood import LLM, Completion, SamplingParams, Structured
from draftwood.config import parse_value
from draftwood.errors import DraftwoodError
from draftwood.structured import StructureMatcher
from outcome import exit_code


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TEXT, LINE = {"type": "string", "maxLength": 80}, {"type": "string", "maxLength": 30}
TREE = {"$defs": {"node": obj(name=LINE, children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2})}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "person": (
        "Extract the person: Anna Smith, 34 years old, lives in Oslo and works as an engineer at Northwind.",
        obj(name=LINE, age={"type": "integer", "minimum": 0, "maximum": 120}, city=LINE, job=LINE, company=LINE),
    ),
    "order": (
        "Extract the order: 3 red shirts at 12.50 each and 1 blue hat at 8.00, shipped to 12 Main Street, Springfield.",
        obj(
            items={
                "type": "array",
                "maxItems": 4,
                "items": obj(product=LINE, colour={"enum": ["red", "blue", "green"]}, quantity={"type": "integer"},
                             unit_price={"type": "number"}),
            },
            shipping_address=obj(street=LINE, city=LINE),
        ),
    ),
    "review": (
        "Judge this review: The battery lasts two days, but the screen scratches easily and support never answered.",
        obj(sentiment={"enum": ["positive", "neutral", "negative"]}, confidence={"enum": ["low", "medium", "high"]},
            positive_points={"type": "array", "items": TEXT, "maxItems": 3},
            negative_points={"type": "array", "items": TEXT, "maxItems": 3}, summary=TEXT),
    ),
    "call": (
        "What will the weather be in Oslo and in Rome tomorrow? Call get_weather for both.",
        {"type": "array", "minItems": 2, "maxItems": 2,
         "items": obj(name={"const": "get_weather"},
                      arguments=obj(city=LINE, days_ahead={"type": "integer", "maximum": 9},
                                    unit={"enum": ["celsius", "fahrenheit"]}))},
    ),
    "recipe": (
        "Write a short recipe for pancakes.",
        obj(title=LINE, servings={"type": "integer", "minimum": 1, "maximum": 12},
            ingredients={"type": "array", "minItems": 3, "maxItems": 5, "items": obj(ingredient=LINE, amount=LINE)},
            steps={"type": "array", "minItems": 2, "maxItems": 3, "items": TEXT}),
    ),
    "tree": ("Draw a family tree of three generations as JSON.", {**TREE, "$ref": "#/$defs/node"}),
}  # fmt: skip


class Mode(NamedTuple):
    drafter: str
    is_masked: bool
    is_forced: bool = True  # whether forced text is drafted


class Run(NamedTuple):
    answer: Completion
    seconds: float


@contextmanager
def without_forced_text() -> Iterator[None]:
    methods = {"forced": mock.Mock(return_value=()), "closing": mock.Mock(return_value=())}
    with mock.patch.multiple(StructureMatcher, **methods):
        yield


def measure(llm: LLM, mode: Mode, prompt: str, schema: Mapping[str, Any], max_tokens: int) -> Run:
    params = SamplingParams(
        max_tokens=max_tokens, structured=Structured(json_schema=schema) if mode.is_masked else None
    )
    message = {"role": "user", "content": f"{prompt} Answer in JSON."}
    ids = llm.tokenizer.apply_chat([message])
    started = time.process_time()
    if mode.is_forced:
        (answer,) = llm.generate(ids, params, drafter=mode.drafter)
    else:
        with without_forced_text():
            (answer,) = llm.generate(ids, params, drafter=mode.drafter)
    return Run(answer, time.process_time() - started)


def check(name: str, schema: Mapping[str, Any], runs: Mapping[str, Run], modes: Mapping[str, Mode]) -> None:
    masked = [run.answer for label, run in runs.items() if modes[label].is_masked]
    if any(answer.token_ids != masked[0].token_ids for answer in masked):
        raise DraftwoodError("A drafter changed a structured answer", got=name)
    if masked[0].finish_reason == "stop":
        try:
            import jsonschema
        except ImportError:
            json.loads(masked[0].text)
        else:
            jsonschema.validate(json.loads(masked[0].text), schema)


def show(modes: Mapping[str, Mode], best: Mapping[str, Mapping[str, Run]]) -> None:
    """One row per mode: sums over all prompts, and the geometric mean of speeds relative to plain masked decoding."""
    print("| mode | tokens | tokens per pass | CPU ms per token | against plain masked |")
    print("| --- | --- | --- | --- | --- |")
    base = best["plain, masked"]

    def pace(run: Run) -> float:
        return run.seconds / len(run.answer.token_ids)

    for label in modes:
        runs = best[label].values()
        tokens = sum(len(run.answer.token_ids) for run in runs)
        passes = sum(run.answer.stats.cycles for run in runs)
        seconds = sum(run.seconds for run in runs)
        ratios = [pace(base[name]) / pace(run) for name, run in best[label].items()]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"| {label} | {tokens} | {tokens / passes:.2f} | {1000 * seconds / tokens:.2f} | {mean:.2f}x |")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="(default: smollm2)")
    parser.add_argument("--drafter", default="goose", help="(default: goose)")
    parser.add_argument("--budget", type=parse_value, default="auto", help="positions per pass (default: auto)")
    parser.add_argument("--max-tokens", type=int, default=160, metavar="N", help="of an answer (default: 160)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(default: 5)")
    parser.add_argument("--texts", action="store_true", help="print the answers")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    def run() -> None:
        args = parse(argv)
        torch.set_num_threads(1)
        drafter = args.drafter
        modes = {
            "plain, unmasked": Mode("plain", False),
            "plain, masked": Mode("plain", True),
            f"{drafter}, unmasked": Mode(drafter, False),
            f"{drafter}, masked, without forced text": Mode(drafter, True, False),
            f"{drafter}, masked": Mode(drafter, True),
        }
        best: dict[str, dict[str, Run]] = {label: {} for label in modes}
        with LLM(args.model, drafter=drafter, budget=args.budget, memory="request") as llm:
            for _ in range(args.rounds):
                for name, (prompt, schema) in CASES.items():
                    runs = {label: measure(llm, mode, prompt, schema, args.max_tokens) for label, mode in modes.items()}
                    check(name, schema, runs, modes)
                    for label, found in runs.items():
                        best[label][name] = min(found, best[label].get(name, found), key=lambda each: each.seconds)
            if args.texts:
                for name in CASES:
                    print(f"{name}: {best['plain, masked'][name].answer.text}")
        show(modes, best)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
