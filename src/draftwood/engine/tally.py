"""Counts of verified trees. Trees are only noted in a cycle and counted many at a time, or when a count is read."""

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from draftwood.compiled import Core, load_core
from draftwood.tree import SOURCE_NUMBERS, DraftTree

MAX_NOTED = 64  # trees that wait to be counted


class _Noted(NamedTuple):
    tree: DraftTree
    accepted: Sequence[int]  # emitted nodes of the path, without the root
    num_emitted: int


class TreeCounts:
    def __init__(self) -> None:
        self._noted: list[_Noted] = []
        self._num_plain = 0
        self._trees_by_depth = Counter[int]()
        self._paths_by_length = Counter[int]()
        self._drafted, self._tried, self._accepted = Counter[str](), Counter[str](), Counter[str]()
        self._accepted_by_path = Counter[str]()
        self._routes = Counter[str]()

    def note(self, tree: DraftTree, accepted: Sequence[int], num_emitted: int) -> None:
        if len(tree) == 1:
            self._num_plain += 1
            return
        self._noted.append(_Noted(tree, accepted, num_emitted))
        if len(self._noted) >= MAX_NOTED:
            self._count()

    @property
    def trees_by_depth(self) -> Counter[int]:
        self._count()
        return self._trees_by_depth

    @property
    def paths_by_length(self) -> Counter[int]:
        self._count()
        return self._paths_by_length

    @property
    def drafted_by_source(self) -> Counter[str]:
        self._count()
        return self._drafted

    @property
    def tried_by_source(self) -> Counter[str]:
        self._count()
        return self._tried

    @property
    def accepted_by_source(self) -> Counter[str]:
        self._count()
        return self._accepted

    @property
    def accepted_by_path(self) -> Counter[str]:
        self._count()
        return self._accepted_by_path

    @property
    def routes(self) -> Counter[str]:
        self._count()
        return self._routes

    def _count(self) -> None:
        noted, self._noted = self._noted, []
        num_plain, self._num_plain = self._num_plain, 0
        if noted:
            core = load_core()
            if core is None:
                self._count_in_python(noted)
            else:
                self._count_in_c(core, noted)
        for tree, accepted, _ in noted:
            self._routes[tree.route or "draft"] += 1
            self._paths_by_length[len(accepted)] += 1
            if accepted:
                sources = [tree.source_of(node) for node in accepted]
                self._accepted_by_path["+".join(dict.fromkeys(sources))] += len(sources)
        if num_plain:
            self._routes["plain"] += num_plain
            self._trees_by_depth[0] += num_plain
            self._paths_by_length[0] += num_plain

    def _count_in_c(self, core: Core, noted: Sequence[_Noted]) -> None:
        trees, paths, lengths, reached = array("q"), array("i"), array("q"), array("q")
        for tree, accepted, num_emitted in noted:
            trees.extend(tree.pack().place)
            paths.extend(accepted)
            lengths.append(len(accepted))
            reached.append(min(num_emitted, len(accepted) + 1))
        num_sources = len(SOURCE_NUMBERS)
        counts, depths = array("q", bytes(24 * num_sources)), array("q", bytes(8 * len(noted)))
        given = [part.buffer_info()[0] for part in (trees, paths, lengths, reached)]
        core.tally(len(noted), *given, num_sources, counts.buffer_info()[0], depths.buffer_info()[0])
        self._trees_by_depth.update(depths)
        for place, into in enumerate((self._drafted, self._tried, self._accepted)):
            for name, count in zip(SOURCE_NUMBERS.names, counts[place * num_sources :], strict=False):
                if count:
                    into[name] += count

    def _count_in_python(self, noted: Sequence[_Noted]) -> None:
        for tree, accepted, num_emitted in noted:
            self._trees_by_depth[max(tree.depths)] += 1
            reached = {0, *accepted[: num_emitted - 1]}  # children of later nodes were cut off by a stop
            self._drafted.update(tree.sources[1:])
            self._tried.update(compress(tree.sources, map(reached.__contains__, tree.parents)))
            self._accepted.update(tree.sources[node] for node in accepted)
