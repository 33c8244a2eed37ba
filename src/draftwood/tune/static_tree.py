"""The static tree that suits a drafter: decode with a far too large one, keep the nodes that were accepted most.

A node of a shape is "the r-th child of its parent", and drafters fill shapes from the best rank on. So the accepted
path of a verified tree is a path of the shape, found by counting children, and a node's count is how many tokens it
won. A node is never accepted without its parent: the nodes with the largest counts are a tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from draftwood.config import MAX_BUDGET, SamplingParams
from draftwood.errors import CapabilityError, OptionError
from draftwood.llm import LLM, DrafterLike, Prompt
from draftwood.progress import Progress, report
from draftwood.tree import BYPASS, DraftTree, TreeShape, initial_tree, prune


class NewLLM(Protocol):
    """Makes the LLM that decodes, as ``functools.partial(LLM, "smollm2", ...)`` does."""

    def __call__(self, *, drafter: DrafterLike, drafter_options: Mapping[str, Any], budget: int) -> LLM: ...


def optimise_tree(
    new_llm: NewLLM,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    drafter: DrafterLike = "stand",
    drafter_options: Mapping[str, Any] | None = None,
    start: TreeShape | None = None,
    size: int = 80,
    progress: Progress | None = None,
) -> tuple[TreeShape, dict[str, Any]]:
    """The ``size`` nodes of ``start`` that won most tokens over the prompts, and what that was measured on.

    ``drafter`` is one with an option ``tree``. Each prompt is answered ``params.n`` times, one answer after another;
    whether they share what the drafter learns is for ``new_llm`` to say (``memory="process"``).
    """
    start = initial_tree() if start is None else start
    if not 1 <= size <= len(start) <= MAX_BUDGET:
        raise OptionError(
            "A tree is cut out of a larger one",
            got=f"{size} of {len(start)} nodes",
            allowed=f"1 to {len(start)} of at most {MAX_BUDGET}",
        )
    if not prompts:
        raise OptionError("A tree is measured on prompts", got="none", next_step="Give some of those it is made for.")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "start.json"
        start.save(path)
        options = {**(drafter_options or {}), "tree": str(path)}
        with new_llm(drafter=drafter, drafter_options=options, budget=len(start)) as llm:
            return _measured(llm, prompts, params, start, size, progress)


def visited(shape: TreeShape, tree: DraftTree, path: Sequence[int]) -> list[int]:
    """The nodes of the shape along a path of a tree that was filled from it, root first.

    Whatever a filled tree lacks, it lacks from the last rank on: the r-th child there is is the r-th of the shape.
    """
    children, shape_children = tree.children(), shape.children()
    places = [0]
    for parent, node in pairwise(path):
        places.append(shape_children[places[-1]][children[parent].index(node)])
    return places


class RankRecord:
    """How often the 1st, 2nd, ... child of an accepted node was accepted: what Sequoia's programme starts from."""

    def __init__(self) -> None:
        self._tried: Counter[int] = Counter()
        self._accepted: Counter[int] = Counter()

    def note(self, shape: TreeShape, tree: DraftTree, places: Sequence[int], path: Sequence[int]) -> None:
        self._accepted.update(shape.ranks[place] for place in places[1:])
        children = tree.children()
        for node in path[: len(places)]:
            self._tried.update(range(len(children[node])))

    def rates(self) -> list[float]:
        return [round(self._accepted[rank] / tried, 4) for rank, tried in sorted(self._tried.items())]


def _measured(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, start: TreeShape, size: int, progress: Progress | None
) -> tuple[TreeShape, dict[str, Any]]:
    if llm.budget < len(start):
        raise CapabilityError("This target cannot verify the tree to start from", got=f"{llm.budget} positions a pass")
    counts = [0] * len(start)
    ranks = RankRecord()
    num_tokens = 0
    runs = [(prompt, index) for prompt in prompts for index in range(params.n)]
    label = f"decoding with {len(start)} nodes"
    report(progress, label, 0, len(runs))
    for done, (prompt, index) in enumerate(runs, start=1):
        for event in llm.stream(prompt, _one_sample(params, index)):
            if event.tree.route == BYPASS:
                continue  # a chain that did not come from the shape
            num_tokens += len(event.token_ids)
            # A stop may cut the last block: what was not emitted was not won.
            places = visited(start, event.tree, event.path[: len(event.token_ids) + 1])
            ranks.note(start, event.tree, places, event.path)
            for place in places:
                counts[place] += 1
        report(progress, label, done, len(runs))
    cycles = counts[0]
    if not cycles:
        raise OptionError("No tree was drafted along the shape", next_step="Give more prompts, or longer answers.")
    shape = prune(start, counts, size)
    about = {
        "model": llm.info.name,
        "drafter": llm.drafter,
        "prompts": len(prompts),
        "samples": params.n,
        "tokens": num_tokens,
        "temperature": params.temperature,
        "nodes": len(shape),
        "depth": max(shape.depths),
        "acceptance": ranks.rates(),
        "start_nodes": len(start),
        "start_tau": round(num_tokens / cycles, 4),
        # Each node that is kept still wins what it won; what the drafter would have learnt otherwise is left out.
        "tau": round(1.0 + sum(sorted(counts, reverse=True)[1:size]) / cycles, 4),
    }
    return shape, about


def _one_sample(params: SamplingParams, index: int) -> SamplingParams:
    seed = None if params.seed is None else params.seed + index
    return replace(params, n=1, seed=seed)
