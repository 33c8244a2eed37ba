"""Files on this machine: the cache folder, whole-or-nothing writes, TOML, compiled C libraries."""

from draftwood.disk.compiler import Library
from draftwood.disk.files import check_place, new_file, with_usual_mode, write_json
from draftwood.disk.store import DiskFullError, cache_home, locked, models_home, new_folder, remove_folder, sha256_of
from draftwood.disk.toml import read_toml

__all__ = [
    "DiskFullError",
    "Library",
    "cache_home",
    "check_place",
    "locked",
    "models_home",
    "new_file",
    "new_folder",
    "read_toml",
    "remove_folder",
    "sha256_of",
    "with_usual_mode",
    "write_json",
]
