"""Who runs when. Methods take turns prompt by prompt, so that a machine that slows down or warms up hits all alike.

Prompts go round the tasks: a run that is stopped early has something of each. Who begins moves on by one with every
prompt, so that nobody always follows the same neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from draftwood.bench.methods import Method
from draftwood.bench.records import Key
from draftwood.bench.tasks import Task, TaskPrompt


class Job(NamedTuple):
    """One method answers one prompt, or a batch of them: all turns, all samples."""

    method: Method
    task: str
    prompts: tuple[TaskPrompt, ...]
    repeat: int

    def keys(self, num_samples: int) -> list[Key]:
        """The records it leaves. Several samples are made of first turns only."""
        return [
            Key(self.method.label, self.task, prompt.id, turn, sample, self.repeat)
            for prompt in self.prompts
            for turn in range(1 if num_samples > 1 else len(prompt.turns))
            for sample in range(num_samples)
        ]


def schedule(tasks: Sequence[Task], methods: Sequence[Method], batch: int, repeats: int) -> list[Job]:
    groups = [
        [(task.name, tuple(task.prompts[at : at + batch])) for at in range(0, len(task.prompts), batch)]
        for task in tasks
    ]
    rounds = [group for row in zip_longest(*groups) for group in row if group is not None]
    jobs = []
    for repeat in range(repeats):
        for number, (task, prompts) in enumerate(rounds):
            first = (number + repeat) % len(methods)
            jobs += [Job(method, task, prompts, repeat) for method in [*methods[first:], *methods[:first]]]
    return jobs
