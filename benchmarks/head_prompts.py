"""Writes prompts for training a head on long contexts: classes to complete, and passages to answer from.

    python benchmarks/head_prompts.py classes --out classes.jsonl
    python benchmarks/head_prompts.py passages dolly.jsonl --count 2000 --out passages.jsonl

classes   classes of Python's standard library without the bodies of their methods
passages  prompts of the given files that have a question and a context: several contexts, then one of the questions
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from draftwood.disk.files import new_file
from draftwood.errors import OptionError
from outcome import exit_code

MIN_METHODS = 2
MAX_CHARACTERS = 6000  # of a prompt
MIN_CONTEXT = 200  # characters
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
TASKS = (
    "Complete the class {name}. Keep its signatures and write the body of every method.",
    "Here is the outline of the class {name}. Implement all of its methods.",
    "Write the missing method bodies of {name}.",
)
QUESTIONS = (
    "Answer the question from the passages below.\n\n{passages}\n\nQuestion: {question}",
    "{passages}\n\nUse the text above to answer: {question}",
    "{question}\n\nThese passages may help:\n\n{passages}",
)


class Passage(NamedTuple):
    question: str
    context: str


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("classes", "passages"))
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="prompt files with contexts")
    parser.add_argument("--count", type=int, default=2000, help="maximum number of prompts (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--library", type=Path, help="folder with Python files (default: the standard library)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(arguments)
    if args.count < 1:
        raise OptionError("--count must be 1 or more", got=args.count)
    if bool(args.files) != (args.kind == "passages"):
        raise OptionError("passages are made from prompt files, classes are not", got=f"{len(args.files)} files")
    return args


def find_classes(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield names and outlines of the classes in Python files."""
    for path in sorted(folder.rglob("*.py")):
        if SKIPPED & set(path.relative_to(folder).parts):
            continue
        try:
            module = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                if len(methods) >= MIN_METHODS:
                    for method in methods:
                        empty_body(method)
                    yield node.name, ast.unparse(node)


def empty_body(method: ast.FunctionDef) -> None:
    """Leave only the docstring, or ``...``."""
    has_docstring = ast.get_docstring(method) is not None
    method.body = method.body[:1] if has_docstring else [ast.Expr(ast.Constant(...))]


def class_prompts(folder: Path, rng: random.Random) -> list[str]:
    found = [
        f"{rng.choice(TASKS).format(name=name)}\n\n{outline}"
        for name, outline in find_classes(folder)
        if len(outline) <= MAX_CHARACTERS
    ]
    rng.shuffle(found)
    return found


def read_passages(files: Sequence[Path]) -> list[Passage]:
    """Return the prompts whose first paragraph is a question about the rest."""
    found = []
    for file in files:
        if not file.is_file():
            raise OptionError("There is no such prompt file", got=str(file))
        for line in file.read_text(encoding="utf-8").splitlines():
            question, _, context = json.loads(line)["turns"][0].partition("\n\n")
            if len(context) >= MIN_CONTEXT:
                found.append(Passage(question.strip(), context.strip()))
    if not found:
        raise OptionError("No prompt has a context", got=", ".join(map(str, files)))
    return found


def passage_prompts(passages: Sequence[Passage], count: int, rng: random.Random) -> list[str]:
    """Return prompts with one to five contexts each, in random order."""
    prompts = []
    for number in range(count):
        own = passages[number % len(passages)]
        others = rng.sample(passages, min(rng.randrange(5), len(passages)))
        kept = [own.context]
        for other in others:
            if other is not own and sum(map(len, kept)) + len(other.context) <= MAX_CHARACTERS:
                kept.append(other.context)
        rng.shuffle(kept)
        text = "\n\n".join(f"[{place}] {context}" for place, context in enumerate(kept, 1))
        prompts.append(rng.choice(QUESTIONS).format(passages=text, question=own.question))
    return list(dict.fromkeys(prompts))


def write(args: argparse.Namespace) -> None:
    rng = random.Random(args.seed)
    if args.kind == "classes":
        prompts = class_prompts(args.library or Path(sysconfig.get_path("stdlib")), rng)[: args.count]
    else:
        prompts = passage_prompts(read_passages(args.files), args.count, rng)
    with new_file(args.out) as path:
        path.write_text("".join(json.dumps({"turns": [prompt]}) + "\n" for prompt in prompts), encoding="utf-8")
    characters = sum(map(len, prompts)) // max(len(prompts), 1)
    print(f"{args.out}: {len(prompts)} prompts of {characters} characters on average")


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: write(parsed(arguments)))


if __name__ == "__main__":
    sys.exit(main())
