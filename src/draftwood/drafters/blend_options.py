"""Options of `blend`: which sources, and how it learns."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.drafters.checks import check_choice, check_flag, check_int
from draftwood.drafters.transition import HARVESTS
from draftwood.errors import OptionError
from draftwood.sources import DatastoreHints, PlaceHints, PositionHints, SuccessorHints

HEAD, MODEL = "head", "model"
AUTO = "auto"  # all tables, what the options name, and the shipped head where its passes pay
NAMES = (PlaceHints.name, SuccessorHints.name, PositionHints.name, DatastoreHints.name, MODEL, HEAD)  # of sources
TABLES = "+".join(NAMES[:3])


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendOptions:
    sources: str = AUTO  # where guesses come from, joined by "+"; "auto": all that is there, a shipped head on a CPU
    model: str = ""  # a small model with the same vocabulary that drafts too: known name, folder, GGUF file or hub id
    datastore: str = ""  # a file of `draftwood datastore build`: also guess what followed in those texts
    head: str = ""  # folder of a draft head; empty, with the source "head": the head that ships for this target
    depth: int = 40  # maximum depth of the tree
    learn: bool = True  # adapt chances to what comes true; false: they stay as they are at first
    priors: bool = True  # start from measured chances; false: from rules of thumb
    top_k: int = 10  # successors kept per context
    bigrams: bool = True  # also keep successors of token pairs
    harvest: str = "all"  # learn from every verified node, or only from "accepted" ones
    static: bool = True  # start from the successor table of the model, if `draftwood tune` has built one
    table_megabytes: int = 128  # memory for token pairs

    def __post_init__(self) -> None:
        names = self.sources.split("+") if isinstance(self.sources, str) else []
        is_valid = len(set(names)) == len(names) and set(names) <= set(NAMES)
        if not names or not (is_valid or self.sources == AUTO):
            raise OptionError(
                "sources must be different sources joined by '+'",
                got=repr(self.sources),
                allowed=[AUTO, *NAMES, f"{TABLES}+{HEAD}"],
            )
        given = {DatastoreHints.name: self.datastore, MODEL: self.model, HEAD: self.head}
        if DatastoreHints.name in names and not self.datastore:
            raise OptionError(
                "The source 'datastore' needs a file",
                allowed="datastore=FILE",
                next_step="Build one: draftwood datastore build FILES... --out FILE",
            )
        if MODEL in names and not self.model:
            raise OptionError("The source 'model' needs a small model", allowed="model=NAME")
        if {HEAD, MODEL} <= set(names) or (self.head and self.model):
            raise OptionError(
                "A tree has a head or a small model, not both",
                got=f"sources={self.sources!r}, head={self.head!r}, model={self.model!r}",
            )
        unused = [name for name, place in given.items() if place and name not in names and self.sources != AUTO]
        if unused:
            raise OptionError(
                f"The option {unused[0]!r} needs the source of that name",
                got=f"sources={self.sources!r}",
                allowed=f"sources={self.sources}+{unused[0]}, or this option without sources",
            )
        check_int(self, 1, "depth", "top_k")
        check_int(self, 1, "table_megabytes", high=1 << 20)
        check_flag(self, "learn", "priors", "bigrams", "static")
        check_choice(self, "harvest", HARVESTS)

    @property
    def drafted(self) -> str:
        """The source that was asked for and runs a model: ``HEAD``, ``MODEL`` or none."""
        if self.sources == AUTO:
            return MODEL if self.model else HEAD if self.head else ""
        return next((name for name in self.sources.split("+") if name in (HEAD, MODEL)), "")

    def list_sources(self, drafted: str = "") -> str:
        """The sources that are asked for, joined by "+". ``drafted``: the one that runs a model."""
        if self.sources != AUTO:
            return self.sources
        names = [TABLES, DatastoreHints.name if self.datastore else "", drafted]
        return "+".join(filter(None, names))
