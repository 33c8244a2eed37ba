"""Records what the target returns to a drafter, without changing what it drafts.

``make_recording_drafter`` subclasses any drafter, for ``LLM(drafter=...)``. Options, memory and trees are those of the
recorded drafter.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from draftwood.bench.records import BenchMethod
from draftwood.bench.replay.recording import DEFAULT_WIDTH, RecordedRequest, Recording
from draftwood.bench.replay.rows import ON_TEXT, RowStore
from draftwood.bench.tasks import Task, TaskPrompt
from draftwood.config import SamplingParams
from draftwood.drafters import Drafter, DraftRequest, PlainDrafter, PromptRows, VerifiedTree, check_drafter
from draftwood.errors import OptionError
from draftwood.llm import LLM, Completion
from draftwood.progress import Progress, report
from draftwood.prompts import Message, prompt_ids
from draftwood.targets import Target, TopRows
from draftwood.text import TextCodec

MIN_LOGPROB = -100.0  # for tokens with probability 0


class RequestRecorder:
    """Records one running request."""

    def __init__(self, request: DraftRequest, width: int) -> None:
        self.prompt_ids = tuple(request.prompt_ids)
        self.params = request.params
        self.output_ids: list[int] = []
        self.accepted_after_stop: tuple[int, ...] = ()  # in the last cycle
        self.rows = RowStore(width)

    def read_prompt(self, rows: PromptRows) -> None:
        contexts = [(ON_TEXT, rows.start + index) for index in range(len(rows.logits))]
        self._add_rows(contexts, rows.best(self.rows.width))

    def observe(self, verified: VerifiedTree) -> None:
        tree = verified.tree
        start = len(self.prompt_ids) + len(self.output_ids) - 1  # the root's position
        # A stop may truncate the path: nodes after the last emitted token are off the text.
        end = len(verified.emitted) + 1
        on_text = set(verified.path[:end])
        self.accepted_after_stop = tuple(tree.tokens[node] for node in verified.path[end:])
        contexts = [
            (ON_TEXT, start + tree.depths[node]) if node in on_text else (-2 - tree.parents[node], tree.tokens[node])
            for node in range(len(tree))
        ]
        self._add_rows(contexts, verified.best(self.rows.width))
        self.output_ids.extend(verified.emitted)

    def _add_rows(self, contexts: Sequence[tuple[int, int]], top: TopRows) -> None:
        logprobs = top.logits - top.log_total[:, None]
        self.rows.add(contexts, top.ids, np.nan_to_num(logprobs, nan=MIN_LOGPROB, posinf=0.0, neginf=MIN_LOGPROB))


class Recorder:
    """Records the requests of recording drafters, in order of their start."""

    def __init__(self, width: int = DEFAULT_WIDTH) -> None:
        self.width = width
        self._requests: list[RequestRecorder] = []

    def begin(self, request: DraftRequest) -> RequestRecorder:
        self._requests.append(RequestRecorder(request, self.width))
        return self._requests[-1]

    def take(self, completions: Sequence[Completion], task: str, prompt: str, turn: int = 0) -> list[RecordedRequest]:
        """Return and clear the records of one call of ``generate`` with one prompt."""
        recorders, self._requests = _in_order(self._requests, completions), []
        return [
            RecordedRequest(
                task=task,
                prompt=prompt,
                turn=turn,
                sample=completion.index,
                prompt_ids=recorder.prompt_ids,
                output_ids=tuple(completion.token_ids),
                params=recorder.params,
                finish_reason=completion.finish_reason,
                accepted_after_stop=recorder.accepted_after_stop,
                rows=recorder.rows,
            )
            for recorder, completion in zip(recorders, completions, strict=True)
        ]


def _in_order(recorders: Sequence[RequestRecorder], completions: Sequence[Completion]) -> list[RequestRecorder]:
    """The recorder of each completion. Samples that run together may start in any order; those with equal texts are
    interchangeable."""
    left, found = list(recorders), list[RequestRecorder]()
    for completion in completions:
        text = list(completion.token_ids)
        found.append(left.pop(next(i for i, each in enumerate(left) if each.output_ids[: len(text)] == text)))
    return found


class _RecordingMixin(Drafter):
    """Mixin that records the calls of a drafter."""

    recorder: ClassVar[Recorder]

    def __init__(self, options: object, shared: object, memory: object = None) -> None:
        super().__init__(options, shared, memory)
        self._drafter_wants_prompt = self.wants_prompt_logits
        self.wants_prompt_logits = True
        self.wants_top = max(self.wants_top, self.recorder.width)

    def begin(self, request: DraftRequest) -> None:
        self._recorder = self.recorder.begin(request)
        super().begin(request)  # type: ignore[safe-super]

    def read_prompt(self, rows: PromptRows) -> None:
        self._recorder.read_prompt(rows)
        if self._drafter_wants_prompt:
            super().read_prompt(rows)

    def observe(self, verified: VerifiedTree) -> None:
        self._recorder.observe(verified)
        super().observe(verified)


def make_recording_drafter(drafter: type[Drafter], recorder: Recorder) -> type[Drafter]:
    """Subclass ``drafter`` to record what the target returns."""
    return type(
        f"Recording{drafter.__name__}", (_RecordingMixin, drafter), {"recorder": recorder, "__doc__": drafter.__doc__}
    )


def check_batch(methods: Sequence[BenchMethod], batch: int) -> None:
    """Raises OptionError if these methods cannot be recorded with so many samples at a time."""
    if batch < 1:
        raise OptionError("At least one sample must run at a time", got=f"batch {batch}", allowed="1 or more")
    if batch > 1 and any(method.drafter != PlainDrafter.name for method in methods):
        raise OptionError(
            "Only plain decoding is recorded in batches: samples of other drafters learn from the ones before",
            got=f"batch {batch} with {', '.join(method.drafter for method in methods)}",
            next_step=f"Record {PlainDrafter.name!r}, or one sample at a time.",
        )


def record(
    target: Target,
    codec: TextCodec,
    methods: Sequence[BenchMethod],
    tasks: Sequence[Task],
    params: SamplingParams,
    into: Recording,
    progress: Progress | None = None,
    batch: int = 1,
) -> None:
    """Run every prompt with every method and add the records to ``into``. Up to ``batch`` samples of a prompt run at a
    time; more than one only without drafts, since drafters learn from the samples before.

    Only complete texts are added, so an interrupted recording can be saved.
    """
    check_batch(methods, batch)
    prompts = [(task.name, prompt) for task in tasks for prompt in task.prompts]
    for method in methods:
        recorder = Recorder(into.width)
        drafter = make_recording_drafter(check_drafter(method.drafter, method.options)[0], recorder)
        tokens = cycles = 0
        left_out = into.num_left_out
        with LLM.from_target(
            target,
            codec,
            drafter=drafter,
            drafter_options=method.options,
            memory=method.memory,
            budget=method.budget,
            max_batch=batch,  # 1: samples of a prompt run in sequence, as in a replay
        ) as llm:
            for done, (task, prompt) in enumerate(prompts):
                report(progress, f"recording {method.label}", done, len(prompts))
                for turn, completions in enumerate(_run_turns(llm, prompt, params)):
                    for request in recorder.take(completions, task, prompt.id, turn):
                        into.add(request)
                    tokens += sum(completion.stats.output_tokens for completion in completions)
                    cycles += sum(completion.stats.cycles for completion in completions)
        totals = {"tokens": tokens, "cycles": cycles, "left_out": into.num_left_out - left_out}
        into.methods.append({**method.as_dict(), **totals})
        report(progress, f"recording {method.label}", len(prompts), len(prompts))


def _run_turns(llm: LLM, prompt: TaskPrompt, params: SamplingParams) -> Iterable[list[Completion]]:
    """Yield the completions of each turn; the first sample continues the conversation."""
    messages: list[Message] = []
    for text in prompt.turns:
        messages.append({"role": "user", "content": text})
        completions = llm.generate([prompt_ids(llm.tokenizer, messages)], params)
        messages.append({"role": "assistant", "content": completions[0].text})
        yield completions
