"""Optimise a static tree: decode with a much larger one and keep the nodes that were accepted most often.

A node of a shape is "the r-th child of its parent", and drafters fill shapes from the best rank on. The accepted path
of a verified tree is therefore a path of the shape, and the count of a node is the number of tokens it won. A node is
never accepted without its parent, so the nodes with the largest counts form a tree.
"""

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
    """Creates the LLM, for example ``functools.partial(LLM, "smollm2", ...)``."""

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
    """Return the ``size`` nodes of ``start`` that won most tokens, and a description of the measurement.

    ``drafter`` must have an option ``tree``. Each prompt is answered ``params.n`` times in sequence. ``new_llm``
    decides whether answers share what the drafter learns (``memory="process"``).
    """
    start = initial_tree() if start is None else start
    if not 1 <= size <= len(start) <= MAX_BUDGET:
        raise OptionError(
            "The tree must be part of a larger one",
            got=f"{size} of {len(start)} nodes",
            allowed=f"1 to {len(start)} of at most {MAX_BUDGET}",
        )
    if not prompts:
        raise OptionError("A tree is measured on prompts", got="none", next_step="Give typical prompts.")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "start.json"
        start.save(path)
        options = {**(drafter_options or {}), "tree": str(path)}
        with new_llm(drafter=drafter, drafter_options=options, budget=len(start)) as llm:
            return _measure(llm, prompts, params, start, size, progress)


def map_path(shape: TreeShape, tree: DraftTree, path: Sequence[int]) -> list[int]:
    """Return the nodes of the shape along a path of a tree that was filled from it, root first.

    A filled tree lacks only last ranks, so the r-th child in the tree is the r-th child in the shape.
    """
    children, shape_children = tree.children(), shape.children()
    places = [0]
    for parent, node in pairwise(path):
        places.append(shape_children[places[-1]][children[parent].index(node)])
    return places


class RankRecord:
    """Counts how often the 1st, 2nd, ... child of an accepted node was accepted, the input of Sequoia's algorithm."""

    def __init__(self) -> None:
        self._tried: Counter[int] = Counter()
        self._accepted: Counter[int] = Counter()

    def add(self, shape: TreeShape, tree: DraftTree, places: Sequence[int], path: Sequence[int]) -> None:
        self._accepted.update(shape.ranks[place] for place in places[1:])
        children = tree.children()
        for node in path[: len(places)]:
            self._tried.update(range(len(children[node])))

    def rates(self) -> list[float]:
        return [round(self._accepted[rank] / tried, 4) for rank, tried in sorted(self._tried.items())]


def _measure(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, start: TreeShape, size: int, progress: Progress | None
) -> tuple[TreeShape, dict[str, Any]]:
    if llm.budget < len(start):
        raise CapabilityError("This target cannot verify the initial tree", got=f"{llm.budget} positions per pass")
    counts = [0] * len(start)
    ranks = RankRecord()
    num_tokens = 0
    runs = [(prompt, index) for prompt in prompts for index in range(params.n)]
    label = f"decoding with {len(start)} nodes"
    report(progress, label, 0, len(runs))
    for done, (prompt, index) in enumerate(runs, start=1):
        for event in llm.stream(prompt, _select_sample(params, index)):
            if event.tree.route == BYPASS:
                continue  # a chain that was not filled from the shape
            num_tokens += len(event.token_ids)
            # A stop may cut the last block: tokens that were not emitted do not count.
            places = map_path(start, event.tree, event.path[: len(event.token_ids) + 1])
            ranks.add(start, event.tree, places, event.path)
            for place in places:
                counts[place] += 1
        report(progress, label, done, len(runs))
    cycles = counts[0]
    if not cycles:
        raise OptionError("No tree was drafted from the shape", next_step="Use more prompts or longer answers.")
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
        # An estimate: kept nodes win the same tokens; effects on what the drafter learns are ignored.
        "tau": round(1.0 + sum(sorted(counts, reverse=True)[1:size]) / cycles, 4),
    }
    return shape, about


def _select_sample(params: SamplingParams, index: int) -> SamplingParams:
    seed = None if params.seed is None else params.seed + index
    return replace(params, n=1, seed=seed)
