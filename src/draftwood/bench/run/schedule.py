"""Who runs when. Methods take turns prompt by prompt, so that a machine that slows down or warms up hits all alike.

Prompts go round the tasks: a run that is stopped early has something of each. Who begins moves on by one with every
prompt, and the order changes with it: what a method leaves behind, a hot processor or a full cache, hits all alike too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from draftwood.bench.records import BenchMethod, RequestKey
from draftwood.bench.tasks import Task, TaskPrompt


class BenchJob(NamedTuple):
    """One method answers one prompt, or a batch of them: all turns, all samples."""

    method: BenchMethod
    task: str
    prompts: tuple[TaskPrompt, ...]
    repeat: int

    def keys(self, num_samples: int) -> list[RequestKey]:
        """The records it leaves. Several samples are made of first turns only."""
        return [
            RequestKey(self.method.label, self.task, prompt.id, turn, sample, self.repeat)
            for prompt in self.prompts
            for turn in range(1 if num_samples > 1 else len(prompt.turns))
            for sample in range(num_samples)
        ]


def schedule(tasks: Sequence[Task], methods: Sequence[BenchMethod], batch: int, repeats: int) -> list[BenchJob]:
    groups = [
        [(task.name, tuple(task.prompts[at : at + batch])) for at in range(0, len(task.prompts), batch)]
        for task in tasks
    ]
    rounds = [group for row in zip_longest(*groups) for group in row if group is not None]
    return [
        BenchJob(methods[place], task, prompts, repeat)
        for repeat in range(repeats)
        for number, (task, prompts) in enumerate(rounds)
        for place in method_order(number + repeat, len(methods))
    ]


def method_order(number: int, count: int) -> list[int]:
    """Who runs first, second, ... in a round. In ``2 * count`` rounds everybody follows everybody else equally often.

    The first round goes inwards from both ends (0, 3, 1, 2), the next ones add one to every place (1, 0, 2, 3; ...).
    The steps between neighbours are all different, so each pair comes once; with an odd count they are not, and the
    same rounds backwards make up for it.
    """
    inwards = [step // 2 if step % 2 == 0 else count - 1 - step // 2 for step in range(count)]
    places = [(place + number) % count for place in inwards]
    return places[::-1] if number // count % 2 else places
