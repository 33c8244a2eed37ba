"""Files on this machine: the cache folder, atomic writes, TOML, C libraries."""

from draftwood.disk.files import apply_umask, check_output, new_file, parse_json, write_json
from draftwood.disk.library import Library, is_unwritable
from draftwood.disk.store import (
    DiskFullError,
    cache_home,
    lock_entry,
    models_home,
    new_entry_file,
    new_folder,
    remove_folder,
    sha256_of,
)
from draftwood.disk.toml import read_toml
