"""Drafters from a Python file: ``--drafter my_drafter.py:MyDrafter``, without a package around it."""

from __future__ import annotations

import inspect
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from draftwood.drafters.base import Drafter
from draftwood.errors import DraftwoodError, OptionError, did_you_mean

SUFFIX = ".py"


def is_file_drafter(name: str) -> bool:
    return name.partition(f"{SUFFIX}:")[1] != "" or name.endswith(SUFFIX)


def load_file_drafter(name: str) -> type[Drafter]:
    """The class of ``FILE.py:CLASS``; without a class, the only drafter that the file defines."""
    place, _, wanted = name.partition(f"{SUFFIX}:")
    path = Path(f"{place.removesuffix(SUFFIX)}{SUFFIX}").expanduser()
    if not path.is_file():
        raise OptionError("There is no such file", got=path, next_step="Name a drafter, or FILE.py:CLASS.")
    module = _load(path.resolve(), path.stat().st_mtime_ns)
    own: dict[str, type[Drafter]] = {key: value for key, value in vars(module).items() if _is_drafter(value)}
    found = [value for value in own.values() if value.__module__ == module.__name__]
    cls = own.get(wanted) if wanted else found[0] if len(found) == 1 else None
    if cls is not None:
        if not hasattr(cls, "name"):
            cls.name = cls.__name__
        return cls
    raise OptionError(
        f"{path} has no drafter {wanted!r}" if wanted else f"{path} has {len(found)} drafters, so name one",
        allowed=[f"{path}:{key}" for key in own] or "classes derived from draftwood.Drafter that implement its methods",
        next_step=did_you_mean(wanted, own),
    )


def _is_drafter(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Drafter) and not inspect.isabstract(value)


@cache
def _load(path: Path, _: int) -> ModuleType:
    """Run a file once per version. Its folder is searched for imports, as when it is run as a script."""
    spec = spec_from_file_location(f"draftwood_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise DraftwoodError(
            f"{path} cannot be imported", got=f"{type(error).__name__}: {error}", next_step="Add --debug for the trace."
        ) from error
    finally:
        sys.path.remove(str(path.parent))
    return module
