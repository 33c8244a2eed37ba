"""Recording: a drafter that runs as it always does while everything the target tells it is written down.

``recording_drafter`` makes a subclass of any drafter. It goes through ``LLM(drafter=...)`` like a drafter of one's own:
options, memory and trees are those of the drafter it records, and nothing of what it drafts changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from draftwood.bench.records import BenchMethod
from draftwood.bench.replay.recording import DEFAULT_WIDTH, RecordedRequest, Recording
from draftwood.bench.replay.rows import ON_TEXT, RowStore
from draftwood.bench.tasks import Task, TaskPrompt
from draftwood.config import SamplingParams
from draftwood.drafters import Drafter, DraftRequest, PromptRows, Verified, check_drafter
from draftwood.llm import LLM, Completion
from draftwood.progress import Progress, report
from draftwood.prompts import Message, prompt_ids
from draftwood.targets import Target, TopRows
from draftwood.text import TextCodec

UNLIKELY = -100.0  # the log-probability of what has none


class RequestRecorder:
    """What one running request was told."""

    def __init__(self, request: DraftRequest, width: int) -> None:
        self.prompt_ids = tuple(request.prompt_ids)
        self.params = request.params
        self.output_ids: list[int] = []
        self.behind: tuple[int, ...] = ()  # accepted in the last cycle, but behind a stop
        self.rows = RowStore(width)

    def read_prompt(self, rows: PromptRows) -> None:
        contexts = [(ON_TEXT, rows.start + index) for index in range(len(rows.logits))]
        self._write(contexts, rows.best(self.rows.width))

    def observe(self, verified: Verified) -> None:
        tree = verified.tree
        start = len(self.prompt_ids) + len(self.output_ids) - 1  # the root's position
        # A stop may cut the path: what lies behind the last emitted token is beside the text like any other guess.
        end = len(verified.emitted) + 1
        on_text = set(verified.path[:end])
        self.behind = tuple(tree.tokens[node] for node in verified.path[end:])
        contexts = [
            (ON_TEXT, start + tree.depths[node]) if node in on_text else (-2 - tree.parents[node], tree.tokens[node])
            for node in range(len(tree))
        ]
        self._write(contexts, verified.best(self.rows.width))
        self.output_ids.extend(verified.emitted)

    def _write(self, contexts: Sequence[tuple[int, int]], top: TopRows) -> None:
        logprobs = top.logits - top.log_total[:, None]
        self.rows.add(contexts, top.ids, np.nan_to_num(logprobs, nan=UNLIKELY, posinf=0.0, neginf=UNLIKELY))


class Recorder:
    """The requests that recording drafters ran, in the order they began."""

    def __init__(self, width: int = DEFAULT_WIDTH) -> None:
        self.width = width
        self._requests: list[RequestRecorder] = []

    def begin(self, request: DraftRequest) -> RequestRecorder:
        self._requests.append(RequestRecorder(request, self.width))
        return self._requests[-1]

    def take(self, completions: Sequence[Completion], task: str, prompt: str, turn: int = 0) -> list[RecordedRequest]:
        """What was recorded of one call of ``generate`` with one prompt; the tape is empty afterwards."""
        tapes, self._requests = self._requests, []
        return [
            RecordedRequest(
                task=task,
                prompt=prompt,
                turn=turn,
                sample=completion.index,
                prompt_ids=tape.prompt_ids,
                output_ids=tuple(completion.token_ids),
                params=tape.params,
                finish_reason=completion.finish_reason,
                behind=tape.behind,
                rows=tape.rows,
            )
            for tape, completion in zip(tapes, completions, strict=True)
        ]


class _RecordingMixin(Drafter):
    """Stands before a drafter's class and listens."""

    tape: ClassVar[Recorder]

    def __init__(self, options: object, shared: object, memory: object = None) -> None:
        super().__init__(options, shared, memory)
        self._prompt_is_wanted = self.wants_prompt_logits
        self.wants_prompt_logits = True
        self.wants_top = max(self.wants_top, self.tape.width)

    def begin(self, request: DraftRequest) -> None:
        self._taped = self.tape.begin(request)
        super().begin(request)  # type: ignore[safe-super]

    def read_prompt(self, rows: PromptRows) -> None:
        self._taped.read_prompt(rows)
        if self._prompt_is_wanted:
            super().read_prompt(rows)

    def observe(self, verified: Verified) -> None:
        self._taped.observe(verified)
        super().observe(verified)


def make_recording_drafter(drafter: type[Drafter], tape: Recorder) -> type[Drafter]:
    """A drafter that does what ``drafter`` does and writes down what it is told."""
    return type(f"Recording{drafter.__name__}", (_RecordingMixin, drafter), {"tape": tape, "__doc__": drafter.__doc__})


def record(
    target: Target,
    codec: TextCodec,
    methods: Sequence[BenchMethod],
    tasks: Sequence[Task],
    params: SamplingParams,
    into: Recording,
    progress: Progress | None = None,
) -> None:
    """Runs every prompt with every method, one request at a time, and adds what was seen to ``into``.

    What is there when something interrupts it can be saved: a text is added when it is whole.
    """
    prompts = [(task.name, prompt) for task in tasks for prompt in task.prompts]
    for method in methods:
        tape = Recorder(into.width)
        drafter = make_recording_drafter(check_drafter(method.drafter, method.options)[0], tape)
        tokens = cycles = 0
        left_out = into.num_left_out
        with LLM.from_target(
            target,
            codec,
            drafter=drafter,
            drafter_options=method.options,
            memory=method.memory,
            budget=method.budget,
            max_batch=1,  # the samples of a prompt run in turn, as they are replayed
        ) as llm:
            for done, (task, prompt) in enumerate(prompts):
                report(progress, f"recording {method.label}", done, len(prompts))
                for turn, completions in enumerate(_answers(llm, prompt, params)):
                    for request in tape.take(completions, task, prompt.id, turn):
                        into.add(request)
                    tokens += sum(completion.stats.output_tokens for completion in completions)
                    cycles += sum(completion.stats.cycles for completion in completions)
        told = {"tokens": tokens, "cycles": cycles, "left_out": into.num_left_out - left_out}
        into.methods.append({**method.as_dict(), **told})
        report(progress, f"recording {method.label}", len(prompts), len(prompts))


def _answers(llm: LLM, prompt: TaskPrompt, params: SamplingParams) -> Iterable[list[Completion]]:
    """The completions of each turn; a conversation goes on from the first sample."""
    messages: list[Message] = []
    for text in prompt.turns:
        messages.append({"role": "user", "content": text})
        completions = llm.generate([prompt_ids(llm.tokenizer, messages)], params)
        messages.append({"role": "assistant", "content": completions[0].text})
        yield completions
