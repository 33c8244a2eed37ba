"""Heads that ship with the package: each a folder in the project's own layout, with a model card.

    heads/shipped/smollm2-eagle3/config.json, model.safetensors, README.md

A head's name is that of its folder. The fingerprint in its configuration identifies its target, not a name or a shape:
fine-tuned models share those, and a head predicts the text of *one* model.
"""

import os
from pathlib import Path
from typing import NamedTuple

from draftwood.errors import ModelError
from draftwood.heads.config import HeadConfig
from draftwood.heads.fit import TargetShape, check_fit
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
    """All shipped heads, or those of one kind, sorted by name. Reads only their config.json."""
    layout = DraftwoodLayout()
    folders = sorted(path.parent for path in FOLDER.glob(f"*/{CONFIG}"))
    heads = [ShippedHead(each.name, each, layout.read_config(read_config_file(each), {}, None)) for each in folders]
    return [head for head in heads if kind in (None, head.config.kind)]


def find_head(head: str | os.PathLike[str]) -> Path:
    """The folder of a head, given a folder or the name of a shipped head. A folder of such a name is ``./NAME``."""
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


def any_head_fits(kind: str, target: TargetShape) -> bool:
    """Whether a shipped head has the sizes of this target, which may be another model of that size."""
    return any(not check_fit(head.config, target) for head in list_shipped_heads(kind))


def find_shipped_head(kind: str | None, target: TargetShape, fingerprint: str) -> ShippedHead | None:
    """The shipped head of this kind, or of any, that was trained for exactly this target; None if there is none."""
    fitting = (head for head in list_shipped_heads(kind) if not check_fit(head.config, target))
    return next((head for head in fitting if head.config.target_fingerprint == fingerprint), None)
