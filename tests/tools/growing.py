"""Trees that run in several passes, and their expected output: the same as in one pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch

from draftwood.targets.base import Segment, Target
from tests.conftest import path_to, prefill, random_parents

Compare = Callable[[torch.Tensor, torch.Tensor], None]


class Step(NamedTuple):
    """One pass over a part of a tree."""

    after: int
    token_ids: list[int]
    parents: list[int]
    is_junk: bool  # nodes that the next step overwrites


class Growth(NamedTuple):
    """A tree after a prompt, and its passes."""

    prompt: list[int]
    token_ids: list[int]
    parents: list[int]
    steps: list[Step | None]  # None: a pass of other trees only

    @property
    def capacity(self) -> int:
        """The tree or its junk, plus two nodes."""
        return len(self.prompt) + 2 * len(self.parents) + 2


def random_growth(rng: random.Random, vocab_size: int, most_prompt: int, most_nodes: int) -> Growth:
    def ids(count: int) -> list[int]:
        return rng.choices(range(3, vocab_size), k=count)

    size = rng.randint(1, most_nodes)
    tokens, parents = ids(size), random_parents(rng, size)
    steps: list[Step | None] = [None] * rng.randint(0, 1)
    after = 0
    while after < size:
        if rng.random() < 0.3:
            junk = random_parents(rng, after + rng.randint(1, size))[after:]
            steps.append(Step(after, ids(len(junk)), junk, True))
        end = rng.randint(after + 1, size)
        steps.append(Step(after, tokens[after:end], parents[after:end], False))
        after = end
    return Growth(ids(rng.randint(0, most_prompt)), tokens, parents, steps)


def grow(target: Target, growths: Sequence[Growth]) -> tuple[list[int], list[torch.Tensor]]:
    """Run all trees together, pass by pass: their sequences, and the logits [n, V] of their nodes."""
    sequences = [prefill(target, growth.prompt, growth.capacity) for growth in growths]
    found: list[list[torch.Tensor]] = [[] for _ in growths]
    for steps in zip_longest(*(growth.steps for growth in growths)):
        running = [(index, step) for index, step in enumerate(steps) if step is not None]
        segments = [
            Segment(sequences[index], step.token_ids, step.parents, len(step.parents), step.after)
            for index, step in running
        ]
        if segments:
            outputs = target.forward(segments).split(segments)
            for (index, step), output in zip(running, outputs, strict=True):
                if not step.is_junk:
                    found[index].append(output.logits.float().cpu().clone())
    return sequences, [torch.cat(rows) for rows in found]


def at_once(target: Target, growths: Sequence[Growth]) -> tuple[list[int], list[torch.Tensor]]:
    """As ``grow``, each tree in one pass of its own."""
    whole = [growth._replace(steps=[Step(0, growth.token_ids, growth.parents, False)]) for growth in growths]
    alone = [grow(target, [growth]) for growth in whole]
    return [sequences[0] for sequences, _ in alone], [logits[0] for _, logits in alone]


def check_growth(
    target: Target, reference: Target, rng: random.Random, growths: Sequence[Growth], compare: Compare
) -> None:
    """Compare each node with the whole trees in the reference, also after a path is kept."""
    grown, whole = grow(target, growths), at_once(reference, growths)
    for ours, theirs in zip(grown[1], whole[1], strict=True):
        compare(ours, theirs)
    for growth, *pair in zip(growths, grown[0], whole[0], strict=True):
        path = path_to(growth.parents, rng.randrange(len(growth.parents)))
        later = []
        for each, sequence in zip((target, reference), pair, strict=True):
            each.keep(sequence, path)
            assert each.length(sequence) == len(growth.prompt) + len(path)
            later.append(each.forward([Segment(sequence, [5, 6], [-1, 0], 2)]).logits.float().cpu().clone())
            each.close(sequence)
        compare(*later)


def passes_of(growths: Sequence[Growth]) -> Iterator[set[bool]]:
    """For every pass: whether it has new trees, and whether it has growing trees."""
    for steps in zip_longest(*(growth.steps for growth in growths)):
        yield {step.after > 0 for step in steps if step is not None}
