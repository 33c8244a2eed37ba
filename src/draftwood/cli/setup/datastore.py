"""``draftwood datastore``: build a datastore for retrieval, or describe one."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftwood.cli.console import Screen, pluralize, show, table
from draftwood.corpus import find_files, load_codec, token_documents
from draftwood.display import readable_size
from draftwood.errors import OptionError
from draftwood.sources import Datastore, DatastoreInfo, build_datastore, tokenizer_fingerprint


def _build(args: argparse.Namespace) -> int:
    screen, output = Screen(args.color), Path(args.out)
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
    size = f"{pluralize(store.info.num_documents, 'document')}, {pluralize(store.info.num_tokens, 'token')}"
    return show(args, _to_dict(output, store.info), [f"{output}: {size}"])


def _show(args: argparse.Namespace) -> int:
    path = Path(args.file)
    info = Datastore.open(path).info
    content = _to_dict(path, info)
    rows = [
        ("documents", f"{info.num_documents:,}"),
        ("tokens", f"{info.num_tokens:,}"),
        ("vocabulary", f"{info.vocab_size:,} tokens, tokenizer {info.tokenizer[:12]}"),
        ("on disk", readable_size(content["num_bytes"])),
        ("source", ", ".join(info.sources) or "unknown"),
    ]
    return show(args, content, table(Screen(args.color).out, rows))


def _to_dict(path: Path, info: DatastoreInfo) -> dict[str, Any]:
    return {"path": path, "num_bytes": path.stat().st_size, **asdict(info)}


def _check_output(output: Path, files: list[Path], force: bool) -> None:
    """Reject an output that cannot be written, before the long build."""
    if output.resolve() in [file.resolve() for file in files]:
        raise OptionError("The output file is also an input", got=output, next_step="Choose another name.")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise OptionError("The output must be a file in an existing folder", got=output)
    if output.exists() and not force:
        raise OptionError("The output already exists", got=output, next_step="Add --force to replace it.")
