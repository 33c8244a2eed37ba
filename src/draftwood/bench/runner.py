"""The benchmark itself: every method on every prompt, in turns, written down as it goes.

A run that is interrupted or killed loses at most the request it was at: the same settings and folder go on from there.
A method that fails is written down as failed, and after a few failures in a row it is left out; the others go on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from draftwood.bench.engines import Answer, Answering, OwnEngine
from draftwood.bench.machine import machine_facts, model_facts, software_facts
from draftwood.bench.methods import DRAFTER, Method, parse_methods
from draftwood.bench.peering import check_peers, start_peers
from draftwood.bench.records import (
    DIFFERENT,
    ERROR,
    IDENTICAL,
    MANIFEST,
    TIE,
    Key,
    Lossless,
    Manifest,
    RequestRecord,
    Run,
    append_records,
    mend,
    read_manifest,
    read_records,
    write_manifest,
    write_records,
)
from draftwood.bench.schedule import Job, schedule
from draftwood.bench.settings import Settings
from draftwood.bench.tasks import Task, TaskPrompt, load_tasks
from draftwood.check import explain
from draftwood.config import SamplingParams
from draftwood.errors import DraftwoodError
from draftwood.llm import LLM
from draftwood.prompts import prompt_ids
from draftwood.target.build import Loaded, load_target
from draftwood.target.store import Progress, report

FAILURES_ALLOWED = 3  # in a row, before a method is left out
WARM_UP_TOKENS = 16
TURN_TOKENS = 16  # at most, that a chat template puts around an answer
Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is run, where it is written, and what the manifest says about it beside."""

    settings: Settings
    folder: Path
    command: str = ""
    recipe: str | None = None
    paper: list[dict[str, Any]] = field(default_factory=list)


def run_bench(request: Request, progress: Progress | None = None, note: Note | None = None) -> Run:
    """Runs what is not done yet and returns everything there is."""
    settings, folder = request.settings, request.folder
    methods = parse_methods(settings.drafters, settings.memory, settings.budget)
    check_peers(settings)
    tasks = load_tasks(settings.tasks, settings.data, settings.limit, progress)
    started = _continued(folder, settings, tasks)
    loaded = load_target(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        target=settings.target,
        max_batch=settings.batch,
        progress=progress,
    )
    longest = _longest(tasks, loaded, settings)
    peers, absent = start_peers(settings, loaded.target.info, loaded.codec, longest, progress)
    engines: dict[str, Answering] = {}
    try:
        for method in methods:
            engines[method.label] = OwnEngine(method, loaded, settings.batch)
        engines.update({method.label: peer for method, peer in peers})
        methods += [method for method, _ in peers]
        manifest = Manifest(
            settings=_plain(settings.as_dict()),
            methods=[method.as_dict() for method in methods],
            tasks={t.name: {"prompts": len(t.prompts), "source": t.source, "sha256": t.sha256} for t in tasks},
            model=model_facts(loaded.target.info),
            machine=machine_facts(),
            software=software_facts(),
            command=request.command,
            started=started or _now(),
            absent=absent,
            recipe=request.recipe,
            paper=request.paper,
        )
        write_manifest(folder, manifest)
        bench = _Bench(request, manifest, methods, tasks, loaded, engines, progress, note)
        return bench.run()
    finally:
        for engine in [*engines.values(), *(peer for _, peer in peers)]:
            engine.close()


class _Bench:
    def __init__(
        self,
        request: Request,
        manifest: Manifest,
        methods: Sequence[Method],
        tasks: Sequence[Task],
        loaded: Loaded,
        engines: Mapping[str, Answering],
        progress: Progress | None,
        note: Note | None,
    ) -> None:
        self._settings, self._folder = request.settings, request.folder
        self._manifest = manifest
        self._methods = methods
        self._loaded = loaded
        self._engines = engines
        self._progress, self._note = progress, note or (lambda text: None)
        self._jobs = schedule(tasks, methods, self._settings.batch, self._settings.repeats)
        self._judge = _Judge(loaded, self._settings, methods)
        self._records: dict[Key, RequestRecord] = {}
        self._answers: dict[tuple[str, str, int], str] = {}  # by task, prompt, turn: what the next turn refers to
        self._failures: Counter[str] = Counter()  # in a row
        for record in read_records(self._folder):
            self._take(record)

    def run(self) -> Run:
        open_jobs = [job for job in self._jobs if not self._is_done(job)]
        done = len(self._jobs) - len(open_jobs)
        if done:
            self._note(f"{done} of {len(self._jobs)} parts are done already; going on")
        if open_jobs:
            self._warm_up(open_jobs)
        label = f"measuring {len(self._methods)} methods"
        for job in open_jobs:
            report(self._progress, label, done, len(self._jobs))
            if job.method.label not in self._manifest.failed:
                self._run_job(job)
            done += 1
        report(self._progress, label, 1, 1)
        return self._finish()

    def _run_job(self, job: Job) -> None:
        try:
            records = self._answered(job)
            self._failures[job.method.label] = 0
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in one method must not end the others
            records = self._failed(job, error)
        for record in records:
            self._take(record)
        append_records(self._folder, records)

    def _answered(self, job: Job) -> list[RequestRecord]:
        engine = self._engines[job.method.label]
        params = self._params(job.repeat)
        records = []
        for turn in range(1 if params.n > 1 else max(len(prompt.turns) for prompt in job.prompts)):
            asked = [prompt for prompt in job.prompts if turn < len(prompt.turns)]
            ids = [self._ids(job.task, prompt, turn) for prompt in asked]
            for prompt, sent, samples in zip(asked, ids, engine.answer(ids, params), strict=True):
                self._answers.setdefault((job.task, prompt.id, turn), samples[0].text)
                for sample, answer in enumerate(samples):
                    key = Key(job.method.label, job.task, prompt.id, turn, sample, job.repeat)
                    records.append(self._judge.judged(_record(key, answer), job.method, sent))
        return records

    def _failed(self, job: Job, error: Exception) -> list[RequestRecord]:
        label = job.method.label
        why = str(error) if isinstance(error, DraftwoodError) else f"{type(error).__name__}: {error}"
        self._failures[label] += 1
        if self._failures[label] >= FAILURES_ALLOWED:
            self._manifest.failed[label] = why
            write_manifest(self._folder, self._manifest)
            self._note(f"{label} is left out from here on, it failed {FAILURES_ALLOWED} times in a row: {why}")
        return [
            RequestRecord(method=label, task=job.task, prompt=prompt.id, repeat=job.repeat, error=why)
            for prompt in job.prompts
        ]

    def _finish(self) -> Run:
        """Verdicts that had to wait for plain decoding, and a file without what was done anew."""
        prompts = {(job.task, prompt.id): prompt for job in self._jobs for prompt in job.prompts}
        methods = {method.label: method for method in self._methods}
        for key, record in self._records.items():
            if record.error is None and record.lossless is None and (key.task, key.prompt) in prompts:
                sent = self._ids(key.task, prompts[key.task, key.prompt], key.turn)
                self._records[key] = self._judge.judged(record, methods[key.method], sent)
        records = list(self._records.values())
        write_records(self._folder, records)
        manifest = replace(self._manifest, finished=_now())
        write_manifest(self._folder, manifest)
        return Run(self._folder.resolve().name, manifest, records)

    def _warm_up(self, jobs: Sequence[Job]) -> None:
        """Every method once, briefly. The prompt is turned round, so that nobody learns anything about the real one."""
        params = replace(self._params(0), max_tokens=min(WARM_UP_TOKENS, self._settings.max_tokens), n=1)
        methods = list(dict.fromkeys(job.method.label for job in jobs))
        first = self._ids(jobs[0].task, jobs[0].prompts[0], 0)
        for number, label in enumerate(methods):
            report(self._progress, "warming up", number, len(methods))
            try:
                self._engines[label].answer([first[::-1]], params)
            except Exception as error:  # noqa: BLE001 - it will fail again where failures are counted
                self._note(f"{label} failed to warm up: {error}")
        report(self._progress, "warming up", 1, 1)

    def _ids(self, task: str, prompt: TaskPrompt, turn: int) -> list[int]:
        """A turn with the turns before it. Their answers are those of whoever was first: all are asked the same."""
        messages = []
        for number in range(turn):
            messages.append({"role": "user", "content": prompt.turns[number]})
            messages.append({"role": "assistant", "content": self._answers[task, prompt.id, number]})
        messages.append({"role": "user", "content": prompt.turns[turn]})
        return prompt_ids(self._loaded.codec, messages, raw=self._settings.raw)

    def _params(self, repeat: int) -> SamplingParams:
        params = self._settings.sampling()
        return params if params.seed is None else replace(params, seed=params.seed + repeat)

    def _is_done(self, job: Job) -> bool:
        found = [self._records.get(key) for key in job.keys(self._settings.num_samples)]
        return all(record is not None and record.error is None for record in found)

    def _take(self, record: RequestRecord) -> None:
        self._records[record.key] = record
        if record.error is None:
            self._answers.setdefault((record.task, record.prompt, record.turn), record.text)
            self._judge.learn(record)


class _Judge:
    """Is a greedy output that of plain decoding?"""

    def __init__(self, loaded: Loaded, settings: Settings, methods: Sequence[Method]) -> None:
        self._loaded = loaded
        self._references = {method.label for method in methods if method.is_plain}
        self._greedy = settings.sampling().is_greedy
        self._plain: dict[tuple[str, str, int], list[int]] = {}  # by task, prompt, turn
        self._llm: LLM | None = None  # made when the first difference turns up

    def learn(self, record: RequestRecord) -> None:
        if record.method in self._references:
            self._plain.setdefault((record.task, record.prompt, record.turn), record.token_ids)

    def judged(self, record: RequestRecord, method: Method, sent: list[int]) -> RequestRecord:
        """With a verdict, if plain decoding has answered this prompt already."""
        plain = self._plain.get((record.task, record.prompt, record.turn))
        if not self._greedy or method.is_plain or plain is None:
            return record
        if record.token_ids == plain:
            return replace(record, lossless=Lossless(verdict=IDENTICAL))
        if self._llm is None:
            self._llm = LLM.from_target(self._loaded.target, self._loaded.codec, drafter="plain", budget=1)
        difference = explain(self._llm, sent, record.token_ids, plain)
        assert difference is not None
        wrong = ERROR if method.kind == DRAFTER else DIFFERENT
        verdict = TIE if difference.is_tie else wrong
        return replace(record, lossless=Lossless(verdict=verdict, position=difference.position, gap=difference.gap))


def _record(key: Key, answer: Answer) -> RequestRecord:
    return RequestRecord(
        **key._asdict(),
        prompt_tokens=answer.prompt_tokens,
        output_tokens=len(answer.token_ids),
        decode_tokens=answer.decode_tokens,
        decode_seconds=answer.decode_seconds,
        total_seconds=answer.total_seconds,
        first_token_seconds=answer.first_token_seconds,
        peak_bytes=answer.peak_bytes,
        finish_reason=answer.finish_reason,
        token_ids=answer.token_ids,
        text=answer.text,
        stats=answer.stats,
    )


def _continued(folder: Path, settings: Settings, tasks: Sequence[Task]) -> str | None:
    """When the run in this folder began; None where there is none. Refuses to mix what does not belong together."""
    if not (folder / MANIFEST).exists():
        if folder.exists() and any(folder.iterdir()):
            raise DraftwoodError(
                "The folder for the results holds something else", got=str(folder), next_step="Name a new folder."
            )
        return None
    manifest = read_manifest(folder)
    wanted = _plain(settings.as_dict())
    other = sorted(name for name in wanted if manifest.settings.get(name) != wanted[name])
    other += [t.name for t in tasks if manifest.tasks.get(t.name, {}).get("sha256") != t.sha256 and not other]
    if other:
        raise DraftwoodError(
            f"The run in {folder} was made with other settings",
            got="different: " + ", ".join(other),
            next_step="Give the same ones to go on with it, or name a new folder.",
        )
    mend(folder)
    return manifest.started


def _longest(tasks: Sequence[Task], loaded: Loaded, settings: Settings) -> int:
    """Positions of the longest request, all turns and answers of it together."""
    longest = 0
    for prompt in (prompt for task in tasks for prompt in task.prompts):
        messages = [{"role": "user", "content": turn} for turn in prompt.turns]
        sent = len(prompt_ids(loaded.codec, messages, raw=settings.raw))
        longest = max(longest, sent + len(prompt.turns) * (settings.max_tokens + TURN_TOKENS))
    return longest


def _plain(content: Mapping[str, Any]) -> dict[str, Any]:
    """As it looks after JSON: lists for tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(content))
    return plain


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
