"""``draftwood datastore``: make a corpus ready for retrieval, and say what one holds."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.cli.console import Screen, Subparsers, add_command, add_group, counted, show, table
from draftwood.config import DEFAULT_MODEL
from draftwood.errors import OptionError

if TYPE_CHECKING:
    from draftwood.sources import DatastoreInfo

_BUILD = (
    "draftwood datastore build notes.txt docs/ --output my.draftwood-datastore",
    "draftwood datastore build answers.jsonl --field completion --output answers.store --model ./my-model",
)
_SHOW = ("draftwood datastore show my.draftwood-datastore",)
_USE = "draftwood generate --drafter rest --drafter-option datastore=my.draftwood-datastore 'Hello'"
_DETAILS = """\
A text file is one document, a line of a .jsonl file another; folders are searched for *.txt, *.md,
*.py and *.jsonl. The datastore serves every model with the same tokenizer."""


def register(commands: Subparsers[Any]) -> None:
    actions = add_group(commands, "datastore", "Make texts ready to draft from", *_BUILD, _USE)
    build = add_command(actions, "build", _build, "Build a datastore from texts", *_BUILD, _USE, details=_DETAILS)
    build.add_argument("files", nargs="+", metavar="FILES", help="text files, .jsonl files or folders")
    build.add_argument("--output", required=True, metavar="NAME", help="the file to write")
    build.add_argument("--model", default=DEFAULT_MODEL, help=f"whose tokenizer to use (default: {DEFAULT_MODEL})")
    build.add_argument("--field", metavar="NAME", help="where .jsonl files keep the text (default: the usual names)")
    build.add_argument("--force", action="store_true", help="replace the output where it exists")
    facts = add_command(actions, "show", _show, "State what a datastore holds", *_SHOW, f"{_SHOW[0]} --json")
    facts.add_argument("file", help="the datastore")
    for action in (build, facts):
        action.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _build(args: argparse.Namespace) -> int:
    from draftwood.corpus import find_files, load_codec, token_documents
    from draftwood.sources import build_datastore, tokenizer_fingerprint

    screen, output = Screen(args.color), Path(args.output)
    files = find_files(args.files)
    _check_output(output, files, args.force)
    codec = load_codec(args.model, screen.progress)
    store = build_datastore(
        token_documents(codec, files, args.field, screen.progress),
        vocab_size=codec.vocab_size,
        tokenizer=tokenizer_fingerprint(codec),
        sources=args.files,
        progress=screen.progress,
    )
    store.save(output, screen.progress)
    size = f"{counted(store.info.num_documents, 'document')}, {counted(store.info.num_tokens, 'token')}"
    return show(args, _content(output, store.info), [f"{output}: {size}"])


def _show(args: argparse.Namespace) -> int:
    from draftwood.display import readable_size
    from draftwood.sources import Datastore

    path = Path(args.file)
    info = Datastore.open(path).info
    content = _content(path, info)
    rows = [
        ("documents", f"{info.num_documents:,}"),
        ("tokens", f"{info.num_tokens:,}"),
        ("vocabulary", f"{info.vocab_size:,} tokens, tokenizer {info.tokenizer[:12]}"),
        ("on disk", readable_size(content["num_bytes"])),
        ("made from", ", ".join(info.sources) or "unknown"),
    ]
    return show(args, content, table(Screen(args.color).out, rows))


def _content(path: Path, info: DatastoreInfo) -> dict[str, Any]:
    return {"path": path, "num_bytes": path.stat().st_size, **asdict(info)}


def _check_output(output: Path, files: list[Path], force: bool) -> None:
    """Refuses early what would be lost or could not be written in the end."""
    if output.resolve() in [file.resolve() for file in files]:
        raise OptionError("The output is one of the texts", got=output, next_step="Give it another name.")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise OptionError("The output is no file in an existing folder", got=output)
    if output.exists() and not force:
        raise OptionError("The output exists already", got=output, next_step="Add --force to replace it.")
