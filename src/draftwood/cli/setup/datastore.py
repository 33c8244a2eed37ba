"""``draftwood datastore``: make a corpus ready for retrieval, and say what one holds."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftwood.cli.console import Screen, counted, show, table
from draftwood.corpus import find_files, load_codec, token_documents
from draftwood.display import readable_size
from draftwood.errors import OptionError
from draftwood.sources import Datastore, DatastoreInfo, build_datastore, tokenizer_fingerprint


def _build(args: argparse.Namespace) -> int:
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
