"""Counts of verified trees. Trees are only noted in a cycle and counted many at a time, or when a count is read."""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftwood.compiled import Core, load_core
from draftwood.engine.calibration import NUM_BINS, Calibration, Floats
from draftwood.tree import SOURCE_NUMBERS, DraftTree, pack_places

MAX_NOTED = 64  # trees that wait to be counted


class _Noted(NamedTuple):
    tree: DraftTree
    accepted: Sequence[int]  # emitted nodes of the path, without the root
    sources: tuple[str, ...]  # of these nodes
    num_emitted: int


class TreeCounts:
    def __init__(self) -> None:
        self._noted: list[_Noted] = []
        self._num_plain = 0
        self._trees_by_depth = Counter[int]()
        self._paths_by_length = Counter[int]()
        self._drafted, self._tried, self._accepted = Counter[str](), Counter[str](), Counter[str]()
        self._calibration = Calibration()
        self._accepted_by_path = Counter[str]()
        self._routes = Counter[str]()

    def note(self, tree: DraftTree, accepted: Sequence[int], num_emitted: int) -> tuple[str, ...]:
        """Returns the sources of the accepted nodes."""
        if tree.size == 1:
            self._num_plain += 1
            return ()
        sources = tuple([tree.source_of(node) for node in accepted])
        self._noted.append(_Noted(tree, accepted, sources, num_emitted))
        if len(self._noted) >= MAX_NOTED:
            self._count()
        return sources

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
    def calibration(self) -> Calibration:
        """Of chosen nodes; a drawn one has the probability that it was drawn with."""
        self._count()
        return self._calibration

    @property
    def routes(self) -> Counter[str]:
        self._count()
        return self._routes

    def _count(self) -> None:
        noted, self._noted = self._noted, []
        num_plain, self._num_plain = self._num_plain, 0
        core = load_core()
        for is_drawn in (False, True):
            group = [each for each in noted if bool(each.tree.proposals) is is_drawn]
            if not group:
                continue
            tried = self._count_in_python(group) if core is None else self._count_in_c(core, group)
            for name, counts in tried.items():
                num_tried, _, num_accepted = counts.sum(axis=0).tolist()
                self._tried[name] += int(num_tried)
                if num_accepted:
                    self._accepted[name] += int(num_accepted)
                if not is_drawn:
                    self._calibration.add(name, counts)
        self._routes.update([tree.route or "draft" for tree, *_ in noted])
        self._paths_by_length.update([len(accepted) for _, accepted, *_ in noted])
        for sources, times in Counter([sources for _, _, sources, _ in noted if sources]).items():
            self._accepted_by_path["+".join(dict.fromkeys(sources))] += times * len(sources)
        if num_plain:
            self._routes["plain"] += num_plain
            self._trees_by_depth[0] += num_plain
            self._paths_by_length[0] += num_plain

    def _count_in_c(self, core: Core, noted: Sequence[_Noted]) -> dict[str, Floats]:
        """Tried nodes by source, as ``Calibration`` has them."""
        paths, lengths, reached = array("i"), array("q"), array("q")
        places = pack_places([tree for tree, *_ in noted])
        for _, accepted, _, num_emitted in noted:
            paths.extend(accepted)
            lengths.append(len(accepted))
            reached.append(min(num_emitted, len(accepted) + 1))
        num_sources = len(SOURCE_NUMBERS)
        drafted, depths = array("q", bytes(8 * num_sources)), array("q", bytes(8 * len(noted)))
        tried = np.zeros((num_sources, NUM_BINS, 3))
        given = [part.buffer_info()[0] for part in (paths, lengths, reached, drafted)]
        core.tally(len(noted), places, *given, tried.ctypes.data, depths.buffer_info()[0])
        self._trees_by_depth.update(depths)
        names = SOURCE_NUMBERS.names
        self._drafted.update({names[number]: count for number, count in enumerate(drafted) if count})
        return {names[number]: counts for number, counts in enumerate(tried) if counts.any()}

    def _count_in_python(self, noted: Sequence[_Noted]) -> dict[str, Floats]:
        tried: dict[str, Floats] = {}
        for tree, accepted, _, num_emitted in noted:
            self._trees_by_depth[max(tree.depths)] += 1
            self._drafted.update(tree.sources[1:])
            reached = {0, *accepted[: num_emitted - 1]}  # children of later nodes were cut off by a stop
            for node, prob in enumerate(tree.probs):
                if tree.parents[node] in reached:
                    chance = min(prob, 1.0) if prob > 0.0 else 0.0  # drafters may be third-party code
                    counts = tried.setdefault(tree.sources[node], np.zeros((NUM_BINS, 3)))
                    counts[min(int(chance * NUM_BINS), NUM_BINS - 1)] += (1.0, chance, node in accepted)
        return tried
