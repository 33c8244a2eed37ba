"""Compare libraries that compute masks for structured output: llguidance, which Draftwood uses, and xgrammar.

    pip install llguidance xgrammar
    python benchmarks/mask_libraries.py --rounds 5

For each schema of ``structured.py``: CPU milliseconds to compile it, to compute one mask, and to check one token and go
on, each the least of all rounds. The path is the same for both: a valid JSON text in the tokens of the model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from draftwood.models.find import resolve
from draftwood.text import Tokenizer
from outcome import exit_code
from structured import CASES

SEPARATORS = (", ", ": ")


class Cost(NamedTuple):
    """CPU seconds."""

    compile: float
    mask: float
    advance: float


def example(schema: dict[str, Any], definitions: dict[str, Any], depth: int = 0) -> Any:
    """A value that matches."""
    if "$ref" in schema:
        return example(definitions[schema["$ref"].rpartition("/")[2]], definitions, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][-1]
    kind = schema["type"]
    if kind == "object":
        return {name: example(value, definitions, depth) for name, value in schema["properties"].items()}
    if kind == "array":
        count = max(schema.get("minItems", 0), 0 if depth > 1 else min(2, schema.get("maxItems", 2)))
        return [example(schema["items"], definitions, depth) for _ in range(count)]
    return {"integer": 4, "number": 12.5, "boolean": True}.get(kind, "A short text of words")


def measure(compile_it: Callable[[], Any], mask: Callable[[Any], Any], advance: Callable[[Any, int], bool],
            tokens: Sequence[int]) -> Cost:  # fmt: skip
    started = time.process_time()
    matcher = compile_it()
    compiled, masking, advancing = time.process_time() - started, 0.0, 0.0
    for token in tokens:
        before = time.process_time()
        mask(matcher)
        between = time.process_time()
        if not advance(matcher, token):
            raise SystemExit("A library refuses a valid text")
        masking, advancing = masking + between - before, advancing + time.process_time() - between
    return Cost(compiled, masking / len(tokens), advancing / len(tokens))


def llguidance_side(words: list[bytes], codec: Tokenizer, end: int) -> Callable[[str, Sequence[int]], Cost]:
    import llguidance
    import llguidance.numpy as masks

    from draftwood.structured.compiler import JSON_LAYOUT, _Tokens

    vocabulary = llguidance.LLTokenizer(_Tokens(codec, len(words), (end,)), n_vocab=len(words), eos_token=[end])
    rows = masks.allocate_token_bitmask(1, len(words))

    def run(schema: str, tokens: Sequence[int]) -> Cost:
        def compile_it() -> Any:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=JSON_LAYOUT)
            return llguidance.LLMatcher(vocabulary, grammar, log_level=0)

        return measure(compile_it, lambda found: masks.fill_next_token_bitmask(found, rows),
                       lambda found, token: bool(found.consume_token(token)), tokens)  # fmt: skip

    return run


def xgrammar_side(words: list[bytes], codec: Tokenizer, end: int) -> Callable[[str, Sequence[int]], Cost]:
    import xgrammar

    vocabulary = xgrammar.TokenizerInfo(words, vocab_size=len(words), stop_token_ids=[end])
    rows = xgrammar.allocate_token_bitmask(1, len(words))

    def run(schema: str, tokens: Sequence[int]) -> Cost:
        def compile_it() -> Any:
            compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
            return xgrammar.GrammarMatcher(
                compiler.compile_json_schema(schema, any_whitespace=False, separators=SEPARATORS)
            )

        return measure(compile_it, lambda found: found.fill_next_token_bitmask(rows),
                       lambda found, token: bool(found.accept_token(token)), tokens)  # fmt: skip

    return run


def main(argv: Sequence[str] | None = None) -> int:
    def run() -> None:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--model", default="smollm2", help="(default: smollm2)")
        parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(default: 5)")
        args = parser.parse_args(argv)
        codec = Tokenizer.from_folder(resolve(args.model).path)
        words = [codec.token_bytes(token) for token in range(codec.vocab_size)]
        end = codec.eos_token_ids[0]
        sides = {"llguidance": llguidance_side(words, codec, end), "xgrammar": xgrammar_side(words, codec, end)}
        print("| schema | tokens | library | compile, ms | mask, ms | token, ms |\n" + "| --- " * 6 + "|")
        for name, (_, schema) in CASES.items():
            text = json.dumps(example(schema, schema.get("$defs", {})), separators=SEPARATORS)
            tokens = codec.encode(text, add_special=False)
            rounds = [
                {side: run(json.dumps(schema), tokens) for side, run in sides.items()} for _ in range(args.rounds)
            ]
            for side in sides:
                least = [1e3 * min(each) for each in zip(*[one[side] for one in rounds], strict=True)]
                print(f"| {name} | {len(tokens)} | {side} | {least[0]:.2f} | {least[1]:.4f} | {least[2]:.4f} |")

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
