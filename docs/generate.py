"""Write the generated parts of the documents from the code: ``python docs/generate.py``, or ``--check`` to compare.

A generated part stands between ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->``; NAME is a key of ``PARTS``.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from prometheus_client import generate_latest  # noqa: E402

from draftwood import LLM, SamplingParams, Structured  # noqa: E402
from draftwood.cli.main import build_parser  # noqa: E402
from draftwood.config import DEFAULT_DRAFTER, EngineOptions, ModelOptions, field_meanings  # noqa: E402
from draftwood.drafters import Drafter, drafter_class  # noqa: E402
from draftwood.drafters.registry import BUILTIN  # noqa: E402
from draftwood.serve.metrics import GAUGES, Metrics  # noqa: E402

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NONE = "\u2013"  # a dash for an empty cell

# The meaning of every argument of LLM(...). Names and defaults come from the signature.
LLM_ARGUMENTS = {
    "model": "known name, folder, GGUF file or hub id",
    "drafter": "name of a registered drafter, or a `Drafter` subclass",
    "drafter_options": "options of the drafter by name",
    "memory": "who shares what drafters learn: `request`, `prompt`, `process`, or a file",
    "budget": "positions per verification pass, or `auto`",
    "progress": "callback for loading and conversion progress",
}

# The meaning of fields whose declaration has no comment.
FIELDS = {
    "max_tokens": "maximum number of output tokens",
    "temperature": "0: greedy decoding",
    "top_p": "nucleus sampling: smallest set of tokens with this total probability",
    "min_p": "minimum probability relative to the most likely token",
    "stop": "strings that end the output; they are not part of it",
    "stop_token_ids": "token ids that end the output",
    "ignore_eos": "continue after the end-of-sequence token",
    "seed": "seed of the random numbers; `None`: a new one for each request",
    "n": "number of samples per prompt",
}

# The meaning of every environment variable. The names are compared with those in the source.
ENVIRONMENT = {
    "DRAFTWOOD_API_KEY": "API key that clients of `draftwood serve` must send",
    "DRAFTWOOD_CC": "C compiler for the kernels, instead of prebuilt ones (default: `cc`, `gcc` or `clang`)",
    "DRAFTWOOD_DEBUG": "`1`: print tracebacks of user errors, as `--debug` does",
    "DRAFTWOOD_HOME": "cache folder (default: `~/.cache/draftwood`)",
    "DRAFTWOOD_NO_KERNEL": "`1`: run without the C kernels",
    "DRAFTWOOD_OFFLINE": "`1`: download nothing",
    "DRAFTWOOD_PEER_*": "Python interpreter of a benchmark peer, for example `DRAFTWOOD_PEER_VLLM`",
    "DRAFTWOOD_VLLM_*": "options of the [proposer for vLLM](vllm.md#options)",
    "HF_HUB_OFFLINE": "`1`: download nothing, as in the Hugging Face tools",
    "NO_COLOR": "any value: no colours in the terminal",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a document is out of date")
    check = parser.parse_args().check
    stale = [path for path in DOCUMENTS if (text := path.read_text(encoding="utf-8")) != render(text)]
    for path in stale:
        print(f"{'out of date' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
    return int(check and bool(stale))


def render(text: str) -> str:
    """Replace every generated part of a document."""
    pattern = r"(<!-- generated: (\S+) -->\n).*?(<!-- end: \2 -->)"
    return re.sub(pattern, lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n{part[3]}", text, flags=re.DOTALL)


# Tables


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


def code(value: object) -> str:
    return f"`{value}`"


def default_text(value: object) -> str:
    if value is MISSING or value is inspect.Parameter.empty or value == "" or value == ():
        return NONE
    return code(value)


def first_paragraph(docstring: str | None) -> str:
    return " ".join((inspect.cleandoc(docstring or "").split("\n\n")[0]).split()).replace("``", "`")


# Options records: names and defaults from the dataclass, meanings from the comments of its fields


def record_table(cls: type[Any], label: str = "option") -> str:
    meanings = {**FIELDS, **{name: text for name, text in field_meanings(cls).items() if text}}
    rows = [(code(each.name), default_text(each.default), meanings.get(each.name, NONE)) for each in fields(cls)]
    return table((label, "default", "meaning"), rows)


def llm_table() -> str:
    parameters = {name: each for name, each in inspect.signature(LLM).parameters.items() if name != "self"}
    parameters.pop("loading")  # the fields of ModelOptions
    if set(parameters) != set(LLM_ARGUMENTS):
        raise SystemExit(f"docs/generate.py: LLM_ARGUMENTS must describe {sorted(parameters)}")
    rows = [(code(name), default_text(each.default), LLM_ARGUMENTS[name]) for name, each in parameters.items()]
    return table(("argument", "default", "meaning"), rows)


def environment_table() -> str:
    sources = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    used = set(re.findall(r"\b(?:DRAFTWOOD_(?!PEER_)[A-Z_]*[A-Z]|HF_HUB_OFFLINE|NO_COLOR)\b", sources))
    used = {name for name in used if not name.startswith("DRAFTWOOD_VLLM_")}
    described = set(ENVIRONMENT) - {"DRAFTWOOD_PEER_*", "DRAFTWOOD_VLLM_*"}
    if used != described:
        raise SystemExit(f"docs/generate.py: ENVIRONMENT must describe {sorted(used)}")
    return table(("variable", "meaning"), [(code(name), text) for name, text in sorted(ENVIRONMENT.items())])


# Drafters


def drafters() -> list[type[Drafter]]:
    """The built-in drafters, the default first, the others by name; drafters of other packages are left out."""
    names = sorted(BUILTIN, key=lambda name: (name != DEFAULT_DRAFTER, name))
    return [drafter_class(name) for name in names]


def summary(cls: type[Drafter]) -> str:
    given = getattr(cls, "summary", "")
    return given or re.sub(r"^`[^`]+`:\s*", "", first_paragraph(cls.__doc__))


def drafter_table(link: str) -> str:
    rows = []
    for cls in drafters():
        is_default = " (default)" if cls.name == DEFAULT_DRAFTER else ""
        guesses_from = getattr(cls, "guesses_from", "") or summary(cls)
        rows.append((f"[`{cls.name}`]({link}#{slug(cls.name)}){is_default}", guesses_from, tree_shape(cls)))
    return table(("drafter", "guesses come from", "tree"), rows)


def tree_shape(cls: type[Drafter]) -> str:
    return getattr(cls, "tree_shape", "") or NONE


def drafter_sections() -> str:
    parts = []
    for cls in drafters():
        parts += [f"### {cls.name}\n", sentence(summary(cls)) + "\n"]
        parts.append(record_table(cls.Options) if fields(cls.Options) else "No options.\n")
    return "\n".join(parts)


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def slug(title: str) -> str:
    """The anchor that MkDocs gives a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


# Command line


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[int, argparse.ArgumentParser]]:
    """Every command below a parser with its depth, parents first."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in dict.fromkeys(action.choices.values()):
                yield 1, child
                yield from ((depth + 1, each) for depth, each in commands(child))


def cli_sections() -> str:
    parts = [command_list(build_parser())]
    for depth, parser in commands(build_parser()):
        parts += [f"{'#' * (depth + 1)} {parser.prog}\n", *command_section(parser)]
    return "\n".join(parts)


def command_list(parser: argparse.ArgumentParser) -> str:
    rows = [
        (f"[`{child.prog}`](#{slug(child.prog)})", first_paragraph(child.description).rstrip("."))
        for depth, child in commands(parser)
        if depth == 1
    ]
    return table(("command", "purpose"), rows)


def command_section(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield (parser.description or "").strip() + "\n"
    for group in parser._action_groups:
        actions = [each for each in group._group_actions if each.help != argparse.SUPPRESS]
        actions = [each for each in actions if not isinstance(each, argparse._HelpAction | argparse._SubParsersAction)]
        if actions:
            yield table(((group.title or "options").lower(), "meaning"), map(argument_row, actions))
    epilog = (parser.epilog or "").removeprefix("examples:\n")
    if epilog.strip():
        yield f"```console\n{inspect.cleandoc(epilog)}\n```\n"


def argument_row(action: argparse.Action) -> tuple[str, str]:
    text = (action.help or NONE) % {**vars(action), "prog": "draftwood"}
    value = "" if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction) else metavar(action)
    if not action.option_strings:
        return code(value), text
    return ", ".join(code(f"{name} {value}".strip()) for name in action.option_strings), text


def metavar(action: argparse.Action) -> str:
    if action.metavar is not None:
        return action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
    if action.choices is not None:
        return "|".join(map(str, action.choices))
    return action.dest.upper() if action.option_strings else action.dest


# Server


def metrics_text() -> str:
    """What GET /metrics returns before the first request."""
    return generate_latest(Metrics(dict.fromkeys(GAUGES, lambda: 0)).registry).decode()


def metrics_table() -> str:
    lines = metrics_text().splitlines()
    kinds = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
    helps = (line.split(maxsplit=3)[2:] for line in lines if line.startswith("# HELP"))
    return table(("metric", "type", "meaning"), [(code(name), kinds[name], text) for name, text in helps])


PARTS: dict[str, Callable[[], str]] = {
    "cli": cli_sections,
    "drafter-table": lambda: drafter_table(""),
    "drafter-table-readme": lambda: drafter_table("docs/drafters.md"),
    "drafter-options": drafter_sections,
    "engine-options": lambda: record_table(EngineOptions),
    "model-options": lambda: record_table(ModelOptions),
    "environment": environment_table,
    "llm-arguments": llm_table,
    "metrics": metrics_table,
    "sampling-params": lambda: record_table(SamplingParams, "field"),
    "structured-options": lambda: record_table(Structured, "field"),
}

if __name__ == "__main__":
    sys.exit(main())
