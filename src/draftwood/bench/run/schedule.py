"""The order of the jobs. Methods alternate prompt by prompt, so that drifting machine speed affects all equally.

Prompts alternate between tasks, so that a run stopped early has results for each task. The order of the methods changes
with every prompt, so that effects on the next method, such as a hot processor or a full cache, are balanced too.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from draftwood.bench.records import BenchMethod, RequestKey
from draftwood.bench.tasks import Task, TaskPrompt


class BenchJob(NamedTuple):
    """One method on one prompt or batch of prompts: all turns, all samples."""

    method: BenchMethod
    task: str
    prompts: tuple[TaskPrompt, ...]
    repeat: int

    def keys(self, num_samples: int) -> list[RequestKey]:
        """Keys of the job's records. With several samples only first turns are run."""
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
    """Order of the methods in a round. In ``2 * count`` rounds each method follows every other equally often.

    The first round goes inwards from both ends (0, 3, 1, 2), each further round adds one to every index (1, 0, 2, 3).
    With an even count the steps between neighbours are all different, so each pair occurs once. With an odd count they
    are not, so the same rounds are repeated in reverse.
    """
    inwards = [step // 2 if step % 2 == 0 else count - 1 - step // 2 for step in range(count)]
    places = [(place + number) % count for place in inwards]
    return places[::-1] if number // count % 2 else places
