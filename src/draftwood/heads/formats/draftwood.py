"""The project's own layout: the original layout of the head's kind, plus an object in config.json with every field.

Programs that support the original layout can read such a head as far as that layout can express it.
"""

from dataclasses import asdict, fields
from typing import Any

from draftwood.errors import ModelError, OptionError
from draftwood.heads.config import KINDS, HeadConfig
from draftwood.heads.formats.eagle import EagleLayout
from draftwood.heads.formats.eagle1 import Eagle1Layout
from draftwood.heads.formats.hydra import HydraLayout
from draftwood.heads.formats.layout import Export, Json, Layout, Shapes
from draftwood.heads.formats.medusa import MedusaLayout
from draftwood.models import ModelConfig, Rope

KEY = "draftwood"
VERSION = 1
_ORIGINALS: dict[str, Layout] = {
    "eagle": Eagle1Layout(),
    "eagle3": EagleLayout(),
    "medusa": MedusaLayout(),
    "hydra": HydraLayout(),
}


class DraftwoodLayout(Layout):
    name = "draftwood"
    kinds = KINDS

    def recognises(self, content: Json, names: set[str]) -> bool:
        return KEY in content

    def stored_names(self, own: str, config: HeadConfig) -> tuple[str, ...]:
        return _ORIGINALS[config.kind].stored_names(own, config)

    def read_config(self, content: Json, shapes: Shapes, model: ModelConfig | None) -> HeadConfig:
        stored = content[KEY]
        version = stored.get("version") if isinstance(stored, dict) else None
        if version != VERSION:
            raise ModelError(
                "This head was saved by another version of draftwood",
                got=f"version {version}",
                allowed=f"version {VERSION}",
                next_step="Use the version of draftwood that saved it, or export it there.",
            )
        return _parse_config({name: value for name, value in stored.items() if name != "version"})

    def write_config(self, config: HeadConfig, export: Export) -> Json:
        original = _ORIGINALS[config.kind].write_config(config, export)
        return {**original, KEY: {"version": VERSION, **asdict(config)}}

    def objections(self, config: HeadConfig) -> list[str]:
        return []


def _parse_config(stored: dict[str, Any]) -> HeadConfig:
    known = {field.name for field in fields(HeadConfig)}
    try:
        rope = Rope(**stored.get("rope", {}))
        return HeadConfig(**{**stored, "rope": rope, "taps": tuple(stored.get("taps", ()))})
    except (TypeError, OptionError) as error:
        unknown = sorted(set(stored) - known)
        raise ModelError(
            "The head's description in config.json is damaged",
            got=f"unknown fields {unknown}" if unknown else getattr(error, "got", None) or error,
            next_step="Download the head again.",
        ) from error
