"""Heads that come with the package: each a folder in the project's own layout, with a model card.

    heads/shipped/smollm2-eagle3/config.json, model.safetensors, README.md

A head's name is that of its folder. Which target it is for is told by the fingerprint in its configuration, not by a
name or a shape: those a fine-tune can share, and a head guesses what *one* model writes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from draftwood.errors import ModelError
from draftwood.heads.config import HeadConfig, TargetShape, check_fit
from draftwood.heads.formats import CONFIG, DraftwoodLayout, read_config_file

FOLDER = Path(__file__).with_name("shipped")


class ShippedHead(NamedTuple):
    name: str
    folder: Path
    config: HeadConfig

    @property
    def title(self) -> str:
        return f"{self.name} (made for {self.config.target_name})"


def list_shipped_heads(kind: str | None = None) -> list[ShippedHead]:
    """All of them, or those of one kind, by name. Of their files only config.json is read."""
    layout = DraftwoodLayout()
    folders = sorted(path.parent for path in FOLDER.glob(f"*/{CONFIG}"))
    heads = [ShippedHead(each.name, each, layout.read_config(read_config_file(each), {}, None)) for each in folders]
    return [head for head in heads if kind in (None, head.config.kind)]


def find_head(head: str | os.PathLike[str]) -> Path:
    """The folder of a head. A shipped one goes by its name; a folder of one's own that is called so is ``./NAME``."""
    name = os.fspath(head)
    shipped = {each.name: each.folder for each in list_shipped_heads()}
    folder = shipped.get(name) or Path(name).expanduser()
    if not folder.exists():
        raise ModelError(
            "There is no such folder, and no head of this name ships",
            got=name,
            allowed=["the folder of a head", *shipped],
        )
    return folder


def find_shipped_head(kind: str, target: TargetShape, fingerprint: str) -> ShippedHead | None:
    """The head of this kind that was trained for this very target, if one ships."""
    fitting = (head for head in list_shipped_heads(kind) if not check_fit(head.config, target))
    return next((head for head in fitting if head.config.target_fingerprint == fingerprint), None)
