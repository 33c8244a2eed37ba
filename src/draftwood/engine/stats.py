"""Statistics of a request, with the same names in the API, in JSON and in the CLI summary."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from draftwood.engine.calibration import Calibration
from draftwood.engine.tally import TreeCounts
from draftwood.tree import DraftTree

SPINE_SOURCE, BRANCH_SOURCE = "context", "transition"
COUNTERS = ("drafted_by_source", "tried_by_source", "accepted_by_source", "accepted_by_path", "routes")
TIMES = ("prefill", "draft", "verify", "accept", "first_token", "total")  # fields NAME_seconds


@dataclass(slots=True)
class RequestStats:
    """Counts and seconds of one request. ``acceptance_length`` is tokens emitted per verification pass."""

    prompt_tokens: int = 0
    reused_tokens: int = 0  # prompt positions found in the cache
    output_tokens: int = 0
    cycles: int = 0
    drafted_nodes: int = 0  # roots not counted
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0  # this request's share of the target's passes, by positions
    accept_seconds: float = 0.0  # acceptance, cache compaction, learning, text
    first_token_seconds: float = 0.0  # from admission
    total_seconds: float = 0.0  # from admission to the last token
    trees: TreeCounts = field(default_factory=TreeCounts, repr=False, compare=False)

    @property
    def acceptance_length(self) -> float:
        return self.output_tokens / self.cycles if self.cycles else 0.0

    @property
    def mean_tree_size(self) -> float:
        """Positions per verification pass, the root included."""
        return (self.drafted_nodes + self.cycles) / self.cycles if self.cycles else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the time after prefill."""
        seconds = self.total_seconds - self.prefill_seconds
        return self.output_tokens / seconds if seconds > 0 else 0.0

    @property
    def trees_by_depth(self) -> Counter[int]:
        """Cycles, by the depth of their tree."""
        return self.trees.trees_by_depth

    @property
    def paths_by_length(self) -> Counter[int]:
        """Cycles, by the number of accepted nodes."""
        return self.trees.paths_by_length

    @property
    def drafted_by_source(self) -> Counter[str]:
        return self.trees.drafted_by_source

    @property
    def tried_by_source(self) -> Counter[str]:
        """Nodes that were drafted as a child of an accepted node."""
        return self.trees.tried_by_source

    @property
    def accepted_by_source(self) -> Counter[str]:
        return self.trees.accepted_by_source

    @property
    def accepted_by_path(self) -> Counter[str]:
        """Tokens, by the sources of the whole path."""
        return self.trees.accepted_by_path

    @property
    def calibration(self) -> Calibration:
        """Expected and real acceptance of chosen nodes whose parent was accepted."""
        return self.trees.calibration

    @property
    def routes(self) -> Counter[str]:
        """Cycles, by the drafter's route."""
        return self.trees.routes

    @property
    def tried_by_depth(self) -> Counter[int]:
        """Cycles whose tree reached depth 1, 2, ..."""
        return _count_reaching(self.trees_by_depth)

    @property
    def accepted_by_depth(self) -> Counter[int]:
        """Cycles that accepted a node at depth 1, 2, ..."""
        return _count_reaching(self.paths_by_length)

    def acceptance_by_source(self) -> dict[str, float]:
        """Acceptance rate by source, given that the parent was accepted."""
        return {source: self.accepted_by_source[source] / tried for source, tried in self.tried_by_source.items()}

    def source_rates(self) -> tuple[float, float] | None:
        """p_s and p_t: acceptance rates of copied and of recycled tokens; None if one of them was never tried, or if
        sources agreed on guesses, which leaves those that they disagree on."""
        rates = self.acceptance_by_source()
        if SPINE_SOURCE in rates and BRANCH_SOURCE in rates and not any("+" in source for source in rates):
            return rates[SPINE_SOURCE], rates[BRANCH_SOURCE]
        return None

    def note_tree(self, tree: DraftTree, accepted: Sequence[int], num_emitted: int) -> tuple[str, ...]:
        """Counts one cycle; ``accepted`` are the emitted nodes of the path, without the root. Returns their sources."""
        self.cycles += 1
        self.output_tokens += num_emitted
        self.drafted_nodes += tree.size - 1
        return self.trees.note(tree, accepted, num_emitted)

    def acceptance_by_depth(self) -> list[float]:
        """Of the trees that reach depth 1, 2, ..., the fraction with a node accepted there."""
        tried, accepted = self.tried_by_depth, self.accepted_by_depth
        return [accepted[depth] / tried[depth] for depth in tried]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        tried, accepted = self.tried_by_depth, self.accepted_by_depth
        return {
            **{name: getattr(self, name) for name in ("prompt_tokens", "reused_tokens", "output_tokens", "cycles")},
            "acceptance_length": round(self.acceptance_length, 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "drafted_nodes": self.drafted_nodes,
            "mean_tree_size": round(self.mean_tree_size, 4),
            "tried_by_depth": list(tried.values()),
            "accepted_by_depth": [accepted[depth] for depth in tried],
            "acceptance_by_depth": [round(rate, 4) for rate in self.acceptance_by_depth()],
            "acceptance_by_source": {name: round(rate, 4) for name, rate in self.acceptance_by_source().items()},
            **{name: dict(getattr(self, name)) for name in COUNTERS},
            "calibration": self.calibration.as_dict(),
            **self._rates(),
            "seconds": {name: round(getattr(self, f"{name}_seconds"), 6) for name in TIMES},
        }

    def _rates(self) -> dict[str, float | None]:
        """p_s, p_t and their ratio, as the papers report them; empty without two sources to compare."""
        rates = self.source_rates()
        if rates is None:
            return {}
        p_s, p_t = rates
        return {"p_s": round(p_s, 4), "p_t": round(p_t, 4), "p_ratio": round(p_s / p_t, 2) if p_t else None}


def _count_reaching(ends: Counter[int]) -> Counter[int]:
    """From counts that end at each depth to counts that reach each depth 1, 2, ..."""
    depths = range(max(ends, default=0), 0, -1)
    reaching = accumulate(ends[depth] for depth in depths)
    return Counter(dict(reversed(list(zip(depths, reaching, strict=True)))))
