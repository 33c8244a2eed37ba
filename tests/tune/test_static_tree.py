"""Optimising a static tree: counting accepted nodes, keeping the best of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from draftwood import LLM, SamplingParams
from draftwood.drafters import Drafter, DraftRequest, VerifiedTree
from draftwood.drafters.recycling import RecyclingDrafter
from draftwood.drafters.shapes import static_tree
from draftwood.drafters.stand import StandDrafter
from draftwood.errors import OptionError
from draftwood.growth.drawn import fill_drawn, make_draw
from draftwood.sources.ngrams import NgramTables
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import ByteTokenizer
from draftwood.tree import DraftTree, TreeBuilder
from draftwood.tree.shapes import TreeShape, chain_tree, initial_tree
from draftwood.tune import optimise_tree
from draftwood.tune.static_tree import map_path
from tests.tools.shapes import uniform_tree

PROMPTS = ["hello hello hello", "xyz" * 10, "one two three one two"]


def new_llm(**options: Any) -> LLM:
    return LLM.from_target(tiny_target(), ByteTokenizer(), memory="process", **options)


class SecondChild(Drafter):
    """Knows the output; the second child of every node is the right token, the others are decoys."""

    name = "second"
    Options = StandDrafter.Options
    ahead: tuple[int, ...] = ()

    def begin(self, request: DraftRequest) -> None:
        self._root = request.prompt_ids[-1]
        self._shape = static_tree(self.options.tree)

    def propose(self, budget: int) -> DraftTree:
        builder = TreeBuilder(self._root)
        nodes = [0]
        on_path = {0: 0}
        for place in range(1, min(budget, len(self._shape))):
            parent, rank = self._shape.parents[place], self._shape.ranks[place]
            depth = on_path.get(parent)
            right = None if depth is None or depth >= len(self.ahead) else self.ahead[depth]
            token = 250 + rank if right is None or rank != 1 else right
            if right is not None and rank == 1:
                on_path[place] = depth + 1  # type: ignore[operator]
            nodes.append(builder.add(nodes[parent], token, "second"))
        return builder.build()

    def observe(self, verified: VerifiedTree) -> None:
        self._root = verified.emitted[-1]
        SecondChild.ahead = self.ahead[len(verified.emitted) :]


def test_accepted_nodes_are_kept() -> None:
    plain = new_llm(drafter="plain", budget=1).generate("count me", SamplingParams(max_tokens=12, ignore_eos=True))[0]
    assert not {250, 251, 252} & set(plain.token_ids)
    SecondChild.ahead = tuple(plain.token_ids)
    seen: list[tuple[str, int, int]] = []
    shape, about = optimise_tree(
        new_llm,
        ["count me"],
        SamplingParams(max_tokens=12, ignore_eos=True),
        drafter=SecondChild,
        start=uniform_tree(3, 40),  # three whole levels below the root
        size=4,
        progress=lambda *step: seen.append(step),
    )
    # Three cycles of three guesses and the bonus; ranks are renumbered, so the second child is now the first.
    assert shape == chain_tree(3)
    assert about["start_tau"] == about["tau"] == 4.0
    assert (about["tokens"], about["prompts"], about["nodes"], about["depth"]) == (12, 1, 4, 3)
    assert (about["model"], about["drafter"], about["temperature"]) == ("tiny", "second", 0.0)
    assert [done for _, done, _ in seen] == [0, 1]


class ChainFirst(SecondChild):
    """Offers a chain that is deeper than the shape in the first cycle, or in all of them."""

    name = "chain-first"
    always = False

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        self._is_first = True

    def propose(self, budget: int) -> DraftTree:
        if not (self._is_first or self.always):
            return super().propose(budget)
        self._is_first = False
        return DraftTree.chain([self._root, *self.ahead[:6]], "second", route="bypass")


def test_chains_outside_the_shape_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = new_llm(drafter="plain", budget=1).generate("count me", params)[0]
    measure = partial(
        optimise_tree, new_llm, ["count me"], params, drafter=ChainFirst, start=uniform_tree(3, 40), size=4
    )
    monkeypatch.setattr(SecondChild, "ahead", tuple(plain.token_ids))
    shape, about = measure()
    # Seven tokens from the chain, then four from a full path of the shape, then the last one.
    assert shape == chain_tree(3)
    assert (about["tokens"], about["start_tau"]) == (5, 2.5)
    monkeypatch.setattr(SecondChild, "ahead", tuple(plain.token_ids))
    monkeypatch.setattr(ChainFirst, "always", True)
    with pytest.raises(OptionError, match="No tree"):
        measure()


def test_block_cut_by_stop_counts_emitted_tokens() -> None:
    plain = new_llm(drafter="plain", budget=1).generate("count me", SamplingParams(max_tokens=12, ignore_eos=True))[0]
    SecondChild.ahead = tuple(plain.token_ids)
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(plain.token_ids[1],))
    shape, about = optimise_tree(new_llm, ["count me"], params, drafter=SecondChild, start=uniform_tree(3, 40), size=4)
    assert about["tokens"] == 2
    assert about["tau"] == 3.0
    assert max(shape.depths) == 2  # the third guess was accepted and cut off: it was not emitted


@pytest.mark.parametrize("drafter", [StandDrafter, RecyclingDrafter])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_optimized_tree_of_real_drafters_has_predicted_yield(drafter: type[Drafter], temperature: float) -> None:
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=1, n=2, ignore_eos=True)
    start = initial_tree(200)
    shape, about = optimise_tree(partial(new_llm), PROMPTS, params, drafter=drafter, start=start, size=30)
    assert len(shape) == about["nodes"] == 30
    assert about["tokens"] == 180
    assert about["samples"] == 2
    assert 1.0 < about["tau"] <= about["start_tau"] + 0.01


def test_default_start_is_the_large_tree() -> None:
    params = SamplingParams(max_tokens=8, temperature=0.5, seed=1, ignore_eos=True)
    shape, about = optimise_tree(new_llm, ["aaaa"], params, drafter=StandDrafter)
    assert len(shape) == 80
    assert about["start_nodes"] == 625


def test_filled_tree_maps_back_to_its_shape() -> None:
    """Also with short rows and unknown contexts, and after the engine cut the tree."""
    rng = np.random.default_rng(0)
    shape = initial_tree(100)
    tables = NgramTables(30, 2, 5)
    for token in range(0, 30, 2):
        ids = rng.choice(30, size=(1, 5), replace=False).astype(np.int32)
        probs = np.where(np.arange(5) < rng.integers(1, 6), 0.2, 0.0).astype(np.float32)[None]
        tables.learn([tables.context([token])], np.where(probs > 0, ids, -1).astype(np.int32), probs)
    checked = 0
    for seed in range(20):
        draw = make_draw("gumbel", np.random.default_rng(seed))
        tree = fill_drawn(shape, 100, 2, tables.context([2]), tables, draw, "ngram").first(60).limit_depth(5)
        for leaf in tree.leaves():
            path = tree.path(leaf)
            places = map_path(shape, tree, path)
            assert [shape.parents[place] for place in places[1:]] == places[:-1]
            ranks = [tree.children_of(tree.parents[node]).index(node) for node in path[1:]]
            assert [shape.ranks[place] for place in places[1:]] == ranks
            checked += len(path) > 2
    assert checked > 20


@pytest.mark.parametrize(
    ("start", "size", "prompts"),
    [(chain_tree(4), 6, ["a"]), (chain_tree(4), 0, ["a"]), (chain_tree(2000), 80, ["a"]), (chain_tree(4), 3, [])],
)
def test_invalid_inputs_are_refused(start: TreeShape, size: int, prompts: list[str]) -> None:
    with pytest.raises(OptionError):
        optimise_tree(new_llm, prompts, SamplingParams(), drafter=StandDrafter, start=start, size=size)
