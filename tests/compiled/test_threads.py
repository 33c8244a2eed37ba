"""Drafts of a batch on several threads: the same bits as on one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from draftwood.compiled import (
    CompiledContext,
    CompiledSpines,
    Hints,
    Outcomes,
    SpineRules,
    load_core,
    observe_blends,
    observe_spines,
    propose_blends,
    propose_spines,
    set_threads,
)
from draftwood.growth import Blend, new_learned
from draftwood.growth.priors import NO_PRIORS
from draftwood.sources import PlaceHints, PositionHints, SuccessorHints, TransitionTable
from draftwood.tree import DraftTree

pytestmark = pytest.mark.skipif(load_core() is None, reason="no compiler")
VOCABULARY, WIDTH, CYCLES = 60, 6, 8
RULES = {"max_draft": 10, "repeat": 1, "bypass": 4, "bypass_length": 4, "bypass_budget": 20, "votes": 1}
RULES |= {"branch_depth": 6, "spine_branches": 1, "spine_source": 1, "branch_source": 2}
SHARES = {"spine_share": 0.5, "min_score": 0.001, "smoothing": 0.1, "low_rate": 0.3, "high_rate": 0.6}
SHARES |= {"low_ratio": 0.3, "middle_ratio": 0.5, "high_ratio": 0.8}


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    yield
    set_threads(1)


def make_tables(sharing: str, count: int) -> list[TransitionTable]:
    """One per request; with ``sharing``, all of them or the first and the last are the same."""
    own = [TransitionTable(VOCABULARY, WIDTH, num_pairs=200, initial=None) for _ in range(count)]
    if sharing == "all":
        return [own[0]] * count
    return [*own[:-1], own[0]] if sharing == "two" else own


class Blends:
    def __init__(self, tables: list[TransitionTable], texts: list[list[int]]) -> None:
        self.tables, self.blends, learned = tables, [], None
        for table, text in zip(tables, texts, strict=True):
            sources = [PlaceHints(), SuccessorHints(table), PositionHints()]
            learned = learned or new_learned(sources, NO_PRIORS)
            for source in sources:
                source.extend(text)
            blend = Blend(sources, learned).compiled
            assert blend is not None
            blend.move_end(text)
            self.blends.append(blend)
        assert learned is not None
        self.learned = learned

    def propose(self, budgets: list[int]) -> list[DraftTree]:
        return propose_blends(self.blends, budgets, 20, 1e-4)

    def observe(self, *seen: Any) -> None:
        observe_blends(self.blends, [table.compiled for table in self.tables], *seen)  # type: ignore[misc]

    def state(self) -> list[bytes]:
        own = self.learned
        return [part.tobytes() for part in (*own.trials, *own.hits, *own.logits, own.weights)]


class Spines:
    def __init__(self, tables: list[TransitionTable], texts: list[list[int]]) -> None:
        self._rules, self.requests = SpineRules(**RULES, **SHARES), []
        core = load_core()
        assert core is not None
        for table, text in zip(tables, texts, strict=True):
            context = CompiledContext(core, (4, 3, 2))
            context.extend(text)
            assert table.compiled is not None
            request = CompiledSpines(self._rules, table.compiled, context, 0.5)
            request.start(*text[-2:])
            self.requests.append(request)

    def propose(self, budgets: list[int]) -> list[DraftTree]:
        return propose_spines(self.requests, budgets)

    def observe(self, *seen: Any) -> None:
        observe_spines(self.requests, *seen)

    def state(self) -> list[bytes]:
        return [np.float64(request.spine_rate).tobytes() for request in self.requests]


def run(kind: type[Blends | Spines], threads: int, sharing: str, count: int) -> tuple[list[Any], list[bytes]]:
    """All trees of some cycles, and what was learned."""
    set_threads(threads)
    rng = np.random.default_rng(count)
    tables = make_tables(sharing, count)
    texts = [rng.integers(0, VOCABULARY, rng.integers(2, 40)).tolist() for _ in range(count)]
    requests, found = kind(tables, texts), list[Any]()
    for _ in range(CYCLES):
        trees = requests.propose(rng.integers(1, 40, count).tolist())
        paths, emitted = list[tuple[int, ...]](), list[list[int]]()
        for tree, text in zip(trees, texts, strict=True):
            found.append((tree.tokens, tree.parents, tree.sources, tree.probs))
            path = [0]
            while (children := [node for node, above in enumerate(tree.parents) if above == path[-1]]) and (
                rng.random() > 0.3
            ):
                path.append(int(rng.choice(children)))
            paths.append(tuple(path))
            emitted.append([*[tree.tokens[node] for node in path[1:]], int(rng.integers(0, VOCABULARY))])
            text += emitted[-1]
        sizes = [len(tree) for tree in trees]
        ids = np.stack([rng.permutation(VOCABULARY)[:WIDTH] for _ in range(sum(sizes))]).astype(np.int32)
        scores = np.sort(rng.dirichlet(np.ones(WIDTH), sum(sizes)).astype(np.float32), axis=1)[:, ::-1].copy()
        first_rows = np.cumsum([0, *sizes[:-1]]).tolist()
        requests.observe(Outcomes(trees, paths, emitted), first_rows, ids, scores)
    state = requests.state()
    for table in tables:
        own = table.compiled
        assert own is not None
        for rows in (own.tokens, own.pairs):
            state += [part[: len(rows)].tobytes() for part in (rows.keys, rows.ids, rows.scores)]
        state.append(own.pairs.order().tobytes())
    return found, state


@pytest.mark.parametrize("count", [8, 13, 32])
@pytest.mark.parametrize("sharing", ["none", "two", "all"])
@pytest.mark.parametrize("kind", [Blends, Spines])
def test_threads_change_nothing(kind: type[Blends | Spines], sharing: str, count: int) -> None:
    assert run(kind, 8, sharing, count) == run(kind, 1, sharing, count)


class PythonSource:
    name = "context"
    priors = (0.1, 0.5)

    def extend(self, tokens: object) -> None: ...

    def learn(self, seen: object) -> None: ...

    def look(self, tail: object, depth: int, /) -> Hints:
        return Hints([1, 2], [1, 1], 0)

    def compiled(self) -> None:
        return None


def test_sources_in_python_are_asked_by_the_calling_thread() -> None:
    """Another one would wait for ever: the caller holds Python's lock."""
    set_threads(8)
    learned, blends = new_learned([PythonSource()], NO_PRIORS), []
    for _ in range(16):
        blend = Blend([PythonSource()], learned).compiled
        assert blend is not None
        blend.move_end([1, 2, 3])
        blends.append(blend)
    assert [tree.size for tree in propose_blends(blends, [8] * 16, 5, 1e-4)] == [8] * 16
