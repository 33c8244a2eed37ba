"""Shared fixtures and helpers: random trees, reference logits, and the default model for tests that need it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import settings

from draftwood.targets.base import Segment, Target, chain_parents

torch.manual_seed(0)
settings.register_profile("project", deadline=None)  # tests never assert times
settings.load_profile("project")


def random_parents(rng: random.Random, size: int) -> list[int]:
    """A random tree in topological order: deep, bushy or in between."""
    reach = rng.choice([1, 2, 4, size])
    return [-1, *(rng.randrange(max(0, node - reach), node) for node in range(1, size))]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def prefill(target: Target, tokens: Sequence[int], capacity: int = 256, chunk: int = 10_000) -> int:
    """A new sequence with these tokens committed."""
    sequence = target.open(capacity)
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        target.forward([Segment(sequence, part, chain_parents(len(part)), 0)])
        target.keep(sequence, range(len(part)))
    return sequence


def logits_after(target: Target, tokens: Sequence[int]) -> torch.Tensor:
    """Logits ``[n, V]`` after every token of a text, in one pass over a fresh sequence."""
    sequence = target.open(len(tokens))
    output = target.forward([Segment(sequence, tokens, chain_parents(len(tokens)), len(tokens))])
    target.close(sequence)
    return output.logits.clone()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of torch threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def isolated_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cost profiles and successor tables of test models are not written to or read from the user's cache."""
    folder = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftwood.sizing.costs.cache_home", lambda: folder)
        patch.setattr("draftwood.sources.successors.cache_home", lambda: folder)
        yield


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.node.name)


@pytest.fixture(scope="session")
def smollm2() -> Callable[[], object]:
    """The default model's folder, fetched and converted once into the cache."""
    from draftwood.models.find import resolve

    return resolve("smollm2")
