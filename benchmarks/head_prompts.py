"""Writes prompts for training a head: code to complete, passages to answer from, and chats of several turns.

    python benchmarks/head_prompts.py classes --out classes.jsonl
    python benchmarks/head_prompts.py functions --out functions.jsonl
    python benchmarks/head_prompts.py passages dolly.jsonl --count 2000 --out passages.jsonl
    python benchmarks/head_prompts.py chats dolly.jsonl --count 4000 --out chats.jsonl
    python benchmarks/head_prompts.py articles cnn_dm.jsonl --count 40 --out rag.jsonl

classes    classes of Python's standard library without the bodies of their methods
functions  its functions with a docstring, without their bodies
passages   prompts of the given files that have a question and a context: several contexts, then one of the questions,
           or one context to summarize
chats      prompts of the given files without a context, each followed by one or two further requests, and texts to
           write and then to answer from
articles   to evaluate: three articles of a file whose prompts are "Summarize: ARTICLE", and a question about one
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
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


FUNCTIONS = (
    "Complete the following function.\n\n{outline}",
    "Write the body of {name}.\n\n{outline}",
    "Implement this Python function:\n\n{outline}",
)
SUMMARIES = (
    "Summarize: {context}",
    "Summarize the following text in three sentences.\n\n{context}",
    "{context}\n\nWhat are the main points of this text?",
    "Write a headline and a short summary for this text:\n\n{context}",
)
SUMMARY_SHARE = 0.3  # of the passages
MIN_DOCSTRING, MAX_DOCSTRING = 40, 1500  # characters
MAX_QUESTION = 600  # characters of the first turn of a chat
REQUESTS = (
    "Explain that in simpler words.",
    "Give me an example.",
    "Now write it as a list of short points.",
    "Rewrite your answer in a more formal tone.",
    "What are the disadvantages?",
    "Can you go into more detail on the last point?",
    "Summarize your answer in one sentence.",
    "Why is that?",
    "Rewrite your previous answer as a short story.",
    "How would you explain this to a child?",
    "Is there another way to look at it?",
    "Add two more ideas to your answer.",
    "Now answer again with at most fifty words.",
    "What would change in the opposite case?",
    "Write a short poem about it.",
    "Which of these is the most important, and why?",
    "Turn your answer into a table.",
    "What should I do first?",
    "Write an email to a colleague about this.",
    "Are you sure? Check your answer again.",
)
FORMS = (
    "Write a news report about {subject}.",
    "Write a blog post about {subject}.",
    "Write a letter to a friend about {subject}.",
    "Tell a short story about {subject}.",
    "Write a speech about {subject}.",
    "Write an interview about {subject}.",
)
SUBJECTS = (
    "a flood in a coastal town",
    "the opening of a new library",
    "a football final that ended in extra time",
    "a court case about a stolen painting",
    "an election in a small country",
    "the rescue of two climbers",
    "a strike of train drivers",
    "a discovery in an old monastery",
    "the price of bread",
    "a teacher who retires after forty years",
    "a fire in a factory",
    "a trip through the mountains of Japan",
    "the first day at a new job",
    "a garden on the roof of a hospital",
    "a storm that closed the airport",
    "a company that builds electric ferries",
    "a family that moved to the countryside",
    "an experiment with a shorter working week",
    "a lost dog that found its way home",
    "a meeting of two rival scientists",
    "a bridge that has to be rebuilt",
    "the return of wolves to the forest",
    "a concert in a railway station",
    "a robbery that went wrong",
    "the history of a village bakery",
    "a school without homework",
    "a marathon in the desert",
    "a new vaccine",
    "a spaceship that lands in a field",
    "the last lighthouse keeper",
)
ABOUT = (
    "Summarize the text above.",
    "Who is named in this text, and what do they do?",
    "What happened first, and what happened last?",
    "Quote the most important sentence and explain it.",
    "Which places are mentioned?",
    "Write a headline for it and a summary in two sentences.",
)
ARTICLE_CHARACTERS = 1100
ARTICLE_QUESTIONS = (
    "What does passage [{number}] report? Answer in three sentences.",
    "Who is named in passage [{number}], and why?",
    "Where and when did the events of passage [{number}] take place?",
    "Quote the most important sentence of passage [{number}] and explain it.",
    "Which passage is about the subject of this sentence: {sentence} What else does it say?",
    "List the main facts of passage [{number}].",
)


class Passage(NamedTuple):
    question: str
    context: str


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("classes", "functions", "passages", "chats", "articles"))
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="prompt files")
    parser.add_argument("--count", type=int, default=2000, help="maximum number of prompts (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--library", type=Path, help="folder with Python files (default: the standard library)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(arguments)
    if args.count < 1:
        raise OptionError("--count must be 1 or more", got=args.count)
    if bool(args.files) != (args.kind in ("passages", "chats", "articles")):
        raise OptionError("Code is not made from prompt files, everything else is", got=f"{len(args.files)} files")
    return args


def read_modules(folder: Path) -> Iterator[ast.Module]:
    for path in sorted(folder.rglob("*.py")):
        if SKIPPED & set(path.relative_to(folder).parts):
            continue
        with suppress(SyntaxError, ValueError):
            yield ast.parse(path.read_text(encoding="utf-8"))


def find_classes(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield names and outlines of the classes in Python files."""
    for module in read_modules(folder):
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                if len(methods) >= MIN_METHODS:
                    for method in methods:
                        empty_body(method)
                    yield node.name, ast.unparse(node)


def find_functions(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield names and outlines of the functions with a docstring in Python files."""
    for module in read_modules(folder):
        for node in ast.walk(module):
            if not isinstance(node, ast.FunctionDef):
                continue
            if MIN_DOCSTRING <= len(ast.get_docstring(node) or "") <= MAX_DOCSTRING:
                empty_body(node)
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


def function_prompts(folder: Path, rng: random.Random) -> list[str]:
    outlines = dict.fromkeys(find_functions(folder))
    found = [rng.choice(FUNCTIONS).format(name=name, outline=outline) for name, outline in outlines]
    rng.shuffle(found)
    return found


def read_turns(files: Sequence[Path]) -> Iterator[str]:
    """Yield the first turns of prompt files."""
    for file in files:
        if not file.is_file():
            raise OptionError("There is no such prompt file", got=str(file))
        for line in file.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)["turns"][0]


def read_passages(files: Sequence[Path]) -> list[Passage]:
    """Return the prompts whose first paragraph is a question about the rest."""
    found = []
    for turn in read_turns(files):
        question, _, context = turn.partition("\n\n")
        if len(context) >= MIN_CONTEXT:
            found.append(Passage(question.strip(), context.strip()))
    if not found:
        raise OptionError("No prompt has a context", got=", ".join(map(str, files)))
    return found


def passage_prompts(passages: Sequence[Passage], count: int, rng: random.Random) -> list[str]:
    """Return prompts with one to five contexts each, in random order, or with one to summarize."""
    prompts = []
    for number in range(count):
        own = passages[number % len(passages)]
        if rng.random() < SUMMARY_SHARE:
            prompts.append(rng.choice(SUMMARIES).format(context=own.context))
            continue
        others = rng.sample(passages, min(rng.randrange(5), len(passages)))
        kept = [own.context]
        for other in others:
            if other is not own and sum(map(len, kept)) + len(other.context) <= MAX_CHARACTERS:
                kept.append(other.context)
        rng.shuffle(kept)
        text = "\n\n".join(f"[{place}] {context}" for place, context in enumerate(kept, 1))
        prompts.append(rng.choice(QUESTIONS).format(passages=text, question=own.question))
    return list(dict.fromkeys(prompts))


def chats(files: Sequence[Path], count: int, rng: random.Random) -> list[list[str]]:
    """Return chats of two or three turns: all that end in questions about a text, then others in random order."""
    questions = [turn for turn in read_turns(files) if len(turn) <= MAX_QUESTION]
    rng.shuffle(questions)
    texts = [form.format(subject=subject) for form in FORMS for subject in SUBJECTS]
    found = [[text, *rng.sample(ABOUT, 2)] for text in texts]
    for number in range(count - len(found)):
        found.append([questions[number % len(questions)], *rng.sample(REQUESTS, rng.choice((1, 1, 2)))])
    return found[:count]


def article_prompts(files: Sequence[Path], count: int) -> list[str]:
    articles = [turn.removeprefix("Summarize: ").strip()[:ARTICLE_CHARACTERS] for turn in read_turns(files)]
    whole = [article[: article.rfind(".") + 1] or article for article in articles]
    prompts = []
    for index in range(count):
        three = [whole[(3 * index + 7 * place) % len(whole)] for place in range(3)]
        asked = index % 3
        question = ARTICLE_QUESTIONS[index % len(ARTICLE_QUESTIONS)]
        passages = "\n\n".join(f"[{place}] {article}" for place, article in enumerate(three, 1))
        sentence = three[asked].split(". ")[0] + "."
        prompts.append(
            f"Answer from the passages.\n\n{passages}\n\n{question.format(number=asked + 1, sentence=sentence)}"
        )
    return prompts


def write(args: argparse.Namespace) -> None:
    rng, folder = random.Random(args.seed), args.library or Path(sysconfig.get_path("stdlib"))
    if args.kind == "chats":
        prompts = chats(args.files, args.count, rng)
    elif args.kind == "passages":
        prompts = [[prompt] for prompt in passage_prompts(read_passages(args.files), args.count, rng)]
    elif args.kind == "articles":
        prompts = [[prompt] for prompt in article_prompts(args.files, args.count)]
    else:
        make = class_prompts if args.kind == "classes" else function_prompts
        prompts = [[prompt] for prompt in make(folder, rng)[: args.count]]
    with new_file(args.out) as path:
        path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in prompts), encoding="utf-8")
    characters = sum(len(turn) for turns in prompts for turn in turns) // max(len(prompts), 1)
    print(f"{args.out}: {len(prompts)} prompts of {characters} characters on average")


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: write(parsed(arguments)))


if __name__ == "__main__":
    sys.exit(main())
