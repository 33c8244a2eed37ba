"""Drafters by name. Other packages add theirs through the entry-point group ``draftwood.drafters``, as this package
does: each entry is a :class:`Drafter` subclass under the name that users type.

A new built-in drafter is one module and one row in ``BUILTIN``; a test compares the entry points in pyproject.toml.
"""

import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from draftwood.config import DEFAULT_MEMORY, from_mapping
from draftwood.drafters.base import Drafter
from draftwood.drafters.files import is_file_drafter, load_file_drafter
from draftwood.drafters.memory import MemoryKeeper, parse_memory
from draftwood.errors import DraftwoodError, OptionError, did_you_mean
from draftwood.targets import Target, TargetInfo
from draftwood.text import TextCodec

GROUP = "draftwood.drafters"
# The package's own drafters; also used when it runs from source without being installed.
BUILTIN = {
    "anpd": "draftwood.drafters.anpd:AdaptiveNgramDrafter",
    "blend": "draftwood.drafters.blend:BlendDrafter",
    "eagle": "draftwood.drafters.heads:EagleDrafter",
    "eagle2": "draftwood.drafters.heads:Eagle2Drafter",
    "eagle3": "draftwood.drafters.heads:Eagle3Drafter",
    "goose": "draftwood.drafters.goose:GooseDrafter",
    "griffin": "draftwood.drafters.heads:GriffinDrafter",
    "hass": "draftwood.drafters.heads:HassDrafter",
    "hydra": "draftwood.drafters.heads:HydraDrafter",
    "iso3": "draftwood.drafters.isotropic:Iso3Drafter",
    "iso5": "draftwood.drafters.isotropic:Iso5Drafter",
    "lookahead": "draftwood.drafters.lookahead:LookaheadDrafter",
    "medusa": "draftwood.drafters.heads:MedusaDrafter",
    "plain": "draftwood.drafters.plain:PlainDrafter",
    "pld": "draftwood.drafters.pld:PromptLookupDrafter",
    "recycling": "draftwood.drafters.recycling:RecyclingDrafter",
    "rest": "draftwood.drafters.rest:RetrievalDrafter",
    "sam": "draftwood.drafters.sam:SuffixDrafter",
    "sam+recycling": "draftwood.drafters.sam_recycling:SuffixRecyclingDrafter",
    "sequoia": "draftwood.drafters.isotropic:SequoiaDrafter",
    "sps": "draftwood.drafters.sps:SmallModelDrafter",
    "stand": "draftwood.drafters.stand:StandDrafter",
}


class DrafterFactory:
    """Creates the drafters of one target, one per request, from a class and its options."""

    def __init__(
        self,
        cls: type[Drafter],
        options: Any,
        target: Target | TargetInfo,
        memory: object = DEFAULT_MEMORY,
        codec: TextCodec | None = None,
    ) -> None:
        """A ``TargetInfo`` is enough for drafters without a model; neural drafters need the target and its codec."""
        plan = parse_memory(memory)
        self.cls = cls
        self.options = options
        if isinstance(target, TargetInfo) or codec is None:
            info = target if isinstance(target, TargetInfo) else target.info
            self._shared = cls.share(options, info)
        else:
            info = target.info
            self._shared = cls.attach(options, target, codec)
        self.memory = MemoryKeeper(lambda: cls.new_memory(options, info, self._shared), plan, info)

    @property
    def name(self) -> str:
        return self.cls.name

    def new(self, group: int, owner: str = "") -> Drafter:
        """Create the drafter of one request. Requests of one ``group`` (samples of a prompt) or ``owner`` may share a
        memory."""
        return self.cls(self.options, self._shared, self.memory.get(group, owner))


def drafter_names() -> list[str]:
    return sorted(_entries())


def drafter_classes() -> dict[str, type[Drafter]]:
    """Every registered drafter by name."""
    return {name: drafter_class(name) for name in drafter_names()}


def drafter_class(name: str) -> type[Drafter]:
    """The class of a registered name, or of ``FILE.py:CLASS``."""
    if is_file_drafter(name):
        return load_file_drafter(name)
    entries = _entries()
    if name not in entries:
        raise OptionError(
            "Unknown drafter",
            got=repr(name),
            allowed=[*sorted(entries), "FILE.py:CLASS"],
            next_step=did_you_mean(name, entries),
        )
    try:
        cls = entries[name].load()
    except (ImportError, AttributeError) as error:
        raise DraftwoodError(f"The drafter {name!r} cannot be loaded", got=f"{entries[name].value}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Drafter)):
        raise DraftwoodError(f"The drafter {name!r} is not a Drafter subclass", got=entries[name].value)
    return cls


def make_factory(
    drafter: str | type[Drafter],
    options: Mapping[str, Any] | None,
    target: Target | TargetInfo,
    memory: object = DEFAULT_MEMORY,
    codec: TextCodec | None = None,
) -> DrafterFactory:
    """``drafter`` is a registered name, ``FILE.py:CLASS`` or a class; ``memory`` is a scope or a file (memory.py)."""
    return DrafterFactory(*check_drafter(drafter, options), target, memory, codec)


def check_drafter(drafter: str | type[Drafter], options: Mapping[str, Any] | None) -> tuple[type[Drafter], Any]:
    """Return the class and its options; raise for unknown names, unknown options and invalid values."""
    cls = drafter_class(drafter) if isinstance(drafter, str) else _check_class(drafter)
    what = f"The drafter {getattr(cls, 'name', cls.__name__)!r}"
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f"{what} takes its options as a mapping", got=repr(options), allowed="{'option': value, ...}")
    record = from_mapping(cls.Options, options or {}, what)
    cls.check(record)
    return cls, record


def _check_class(drafter: object) -> type[Drafter]:
    if isinstance(drafter, type) and issubclass(drafter, Drafter) and not inspect.isabstract(drafter):
        return drafter
    raise OptionError(
        "This is not a drafter",
        got=repr(drafter),
        allowed=[*drafter_names(), "a class derived from Drafter that implements its methods"],
        next_step="Pass the class, not an instance." if isinstance(drafter, Drafter) else None,
    )


def _entries() -> dict[str, EntryPoint]:
    found = {name: EntryPoint(name, value, GROUP) for name, value in BUILTIN.items()}
    found.update({entry.name: entry for entry in entry_points(group=GROUP)})
    return found
