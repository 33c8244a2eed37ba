"""The benchmark itself: every method on every prompt, in turns, written down as it goes.

A run that is interrupted or killed loses at most the conversation or batch it was at: the same settings and folder go
on from there.
A method that fails is written down as failed, and after a few failures in a row it is left out; the others go on.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from draftwood.bench.records import (
    MANIFEST,
    Key,
    Manifest,
    Method,
    RequestRecord,
    Run,
    Settings,
    append_records,
    check_memories,
    held,
    machine_facts,
    mend,
    model_facts,
    parse_methods,
    read_manifest,
    read_records,
    software_facts,
    write_manifest,
    write_records,
)
from draftwood.bench.run.engines import Answer, Answering, OwnEngine
from draftwood.bench.run.judge import Judge
from draftwood.bench.run.peering import check_peers, longest_request, start_peers
from draftwood.bench.run.schedule import Job, schedule
from draftwood.bench.tasks import Task, TaskPrompt, load_tasks
from draftwood.config import SamplingParams
from draftwood.errors import DraftwoodError, PromptError
from draftwood.progress import Progress, report
from draftwood.prompts import prompt_ids
from draftwood.targets import Loaded, load_target

FAILURES_ALLOWED = 3  # in a row, before a method is left out
WARM_UP_TOKENS = 16
Note = Callable[[str], None]
Answers = MutableMapping[tuple[str, str, int], str]  # by task, prompt, turn


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
    with held(request.folder):
        prepared = prepare(request, progress)
        mend(request.folder)
        return _run(request, prepared, progress, note)


class Prepared(NamedTuple):
    """What a run needs beside the model."""

    methods: list[Method]  # our own
    tasks: list[Task]
    before: Manifest | None  # of the run that is gone on with


def prepare(request: Request, progress: Progress | None = None) -> Prepared:
    """Refuses what cannot be run, as far as that can be told without the model; changes nothing."""
    settings = request.settings
    methods = parse_methods(settings.drafters, settings.memory, settings.budget)
    check_memories(methods, settings.repeats)
    check_peers(settings)
    tasks = load_tasks(settings.tasks, settings.data, settings.limit, progress)
    return Prepared(methods, tasks, _continued(request.folder, settings, tasks))


def _run(request: Request, prepared: Prepared, progress: Progress | None, note: Note | None) -> Run:
    settings = request.settings
    methods, tasks, before = prepared
    loaded = load_target(
        settings.model,
        dtype=settings.dtype,
        quantize=settings.quantize,
        device=settings.device,
        target=settings.target,
        max_batch=settings.batch,
        progress=progress,
    )
    longest = longest_request(tasks, loaded, settings) if settings.peers else 0  # nobody else asks
    with ExitStack() as closing:
        peers, absent = start_peers(settings, loaded, longest, closing, progress)
        engines: dict[str, Answering] = {}
        for method in methods:
            engine = OwnEngine(method, loaded, settings.batch)
            closing.callback(engine.close)
            engines[method.label] = engine
        engines |= {method.label: peer for method, peer in peers}
        methods = [*methods, *(method for method, _ in peers)]
        if not methods:
            raise DraftwoodError("There is nobody to measure", got="; ".join(absent.values()))
        manifest = Manifest(
            settings=_as_json(settings.as_dict()),
            methods=_listed(methods, before),
            tasks={t.name: {"prompts": len(t.prompts), "source": t.source, "sha256": t.sha256} for t in tasks},
            model=model_facts(loaded.target.info),
            machine=machine_facts(),
            software=software_facts(),
            command=request.command,
            started=_now() if before is None else before.started,
            absent=absent,
            recipe=request.recipe,
            paper=request.paper,
        )
        write_manifest(request.folder, manifest)
        return _Bench(request, manifest, methods, tasks, loaded, engines, progress, note).run()


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
        self._loaded = loaded
        self._engines = engines
        self._progress, self._note = progress, note or (lambda text: None)
        self._jobs = schedule(tasks, methods, self._settings.batch, self._settings.repeats)
        self._judge = Judge(loaded, methods, is_greedy=self._settings.sampling().is_greedy)
        self._records: dict[Key, RequestRecord] = {}  # in the order they were made
        self._answers: Answers = {}  # of whoever was first: what the next turn refers to
        self._failures: dict[str, list[str]] = {}  # in a row, by method
        self._open_jobs = self._go_on(read_records(self._folder))

    def _go_on(self, kept: Sequence[RequestRecord]) -> list[Job]:
        """Takes over what an earlier start has left; returns what is still to be done.

        A kill can cut off a part of what a job wrote. The job is done again as a whole, so what there is of it does not
        count: the answers that later turns refer to must be those that stay in the file.
        """
        last = {record.key: record for record in kept}
        samples = self._settings.num_samples
        open_jobs = [job for job in self._jobs if not _is_done(job.keys(samples), last)]
        again = {key for job in open_jobs for key in job.keys(samples)}
        for record in kept:
            if record is last[record.key] and (record.error is not None or record.key not in again):
                self._take(record)
        return open_jobs

    def run(self) -> Run:
        jobs, total = self._open_jobs, len(self._jobs)
        done = total - len(jobs)
        if done:
            self._note(f"{done} of {total} parts are done already; going on")
            forgetful = sorted({job.method.label for job in jobs if job.method.memory == "process"})
            if forgetful:
                self._note(f"what they had learned is lost, they begin anew: {', '.join(forgetful)}")
        if jobs:
            self._warm_up(jobs)
        label = f"measuring {len(self._engines)} method{'' if len(self._engines) == 1 else 's'}"
        for job in jobs:
            report(self._progress, label, done, total)
            if job.method.label not in self._manifest.failed:
                self._run_job(job)
            done += 1
        report(self._progress, label, 1, 1)
        return self._finish()

    def _run_job(self, job: Job) -> None:
        try:
            records = self._answered(job)
            if any(record.error is None for record in records):
                self._failures.pop(job.method.label, None)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in one method must not end the others
            records = self._failed(job, error)
        for record in records:
            self._take(record)
        append_records(self._folder, records)

    def _answered(self, job: Job) -> list[RequestRecord]:
        engine = self._engines[job.method.label]
        params = self._params(job.repeat)
        batch = job.prompts[0].id if len(job.prompts) > 1 else ""
        answers: Answers = ChainMap({}, self._answers)  # new ones count for others once the whole job is done
        records = []
        prompts = list(job.prompts)
        for turn in range(1 if params.n > 1 else max(len(prompt.turns) for prompt in prompts)):
            fitting, refused = self._asked(job, prompts, turn, answers)
            records += refused
            if not fitting:
                break
            prompts, ids = list(fitting), list(fitting.values())
            for prompt, sent, samples in zip(prompts, ids, engine.answer(ids, params), strict=True):
                answers.setdefault((job.task, prompt.id, turn), samples[0].text)
                for sample, answer in enumerate(samples):
                    key = Key(job.method.label, job.task, prompt.id, turn, sample, job.repeat)
                    records.append(self._judged(_record(key, answer, batch), sent))
        return records

    def _asked(
        self, job: Job, prompts: Sequence[TaskPrompt], turn: int, answers: Answers
    ) -> tuple[dict[TaskPrompt, list[int]], list[RequestRecord]]:
        """What is sent of the prompts that have this turn, and records of those that cannot be: others go on."""
        fitting: dict[TaskPrompt, list[int]] = {}
        refused = []
        for prompt in (prompt for prompt in prompts if turn < len(prompt.turns)):
            try:
                fitting[prompt] = self._ids(job.task, prompt, turn, answers)
            except PromptError as error:
                refused.append(_error_record(job, prompt, str(error), turn))
        return fitting, refused

    def _failed(self, job: Job, error: Exception) -> list[RequestRecord]:
        label = job.method.label
        why = str(error) if isinstance(error, DraftwoodError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, PromptError):  # that would be the prompt's fault, whoever is asked
            self._count_failure(label, why)
        return [_error_record(job, prompt, why) for prompt in job.prompts]

    def _count_failure(self, label: str, why: str) -> None:
        """Told is the first reason: of a peer that died, the others say no more than that it is gone."""
        reasons = self._failures.setdefault(label, [])
        reasons.append(why)
        if len(reasons) >= FAILURES_ALLOWED:
            self._manifest.failed[label] = reasons[0]
            write_manifest(self._folder, self._manifest)
            self._note(f"{label} is left out from here on, it failed {len(reasons)} times in a row: {reasons[0]}")

    def _finish(self) -> Run:
        """Verdicts that had to wait for plain decoding, and a file without what was done anew."""
        prompts = {(job.task, prompt.id): prompt for job in self._jobs for prompt in job.prompts}
        for key, record in self._records.items():
            if self._judge.can_judge(record):
                sent = self._ids(key.task, prompts[key.task, key.prompt], key.turn, self._answers)
                self._records[key] = self._judge.judged(record, sent)
        records = list(self._records.values())
        write_records(self._folder, records)
        manifest = replace(self._manifest, finished=_now())
        write_manifest(self._folder, manifest)
        return Run(self._folder.resolve().name, manifest, records)

    def _warm_up(self, jobs: Sequence[Job]) -> None:
        """Every method once, briefly. The prompt is turned round, so that nobody learns anything about the real one."""
        params = replace(self._params(0), max_tokens=min(WARM_UP_TOKENS, self._settings.max_tokens), n=1)
        methods = list(dict.fromkeys(job.method.label for job in jobs))
        messages = [{"role": "user", "content": jobs[0].prompts[0].turns[0]}]
        ids = prompt_ids(self._loaded.codec, messages, raw=self._settings.raw)[::-1][: self._room // 2]
        for number, label in enumerate(methods):
            report(self._progress, "warming up", number, len(methods))
            try:
                self._engines[label].warm_up([ids] * len(jobs[0].prompts), params)
            except Exception as error:  # noqa: BLE001 - it will fail again where failures are counted
                self._note(f"{label} failed to warm up: {error}")
        report(self._progress, "warming up", 1, 1)

    def _ids(self, task: str, prompt: TaskPrompt, turn: int, answers: Answers) -> list[int]:
        """A turn with the turns before it. Their answers are those of whoever was first: all are asked the same."""
        messages = []
        for number in range(turn):
            messages.append({"role": "user", "content": prompt.turns[number]})
            messages.append({"role": "assistant", "content": answers[task, prompt.id, number]})
        messages.append({"role": "user", "content": prompt.turns[turn]})
        ids = prompt_ids(self._loaded.codec, messages, raw=self._settings.raw)
        if len(ids) >= self._room:
            raise PromptError(
                "The prompt is longer than the context", got=f"{len(ids)} tokens", allowed=f"at most {self._room - 1}"
            )
        return ids

    @property
    def _room(self) -> int:
        """Tokens of a prompt and its answer together."""
        return min(self._loaded.target.info.context_length, self._loaded.target.num_slots)

    def _params(self, repeat: int) -> SamplingParams:
        """Seeds of their own for every round; a peer takes one for each sample, counted from here."""
        params = self._settings.sampling()
        return params if params.seed is None else replace(params, seed=params.seed + repeat * params.n)

    def _judged(self, record: RequestRecord, sent: list[int]) -> RequestRecord:
        return self._judge.judged(record, sent) if self._judge.can_judge(record) else record

    def _take(self, record: RequestRecord) -> None:
        self._records.pop(record.key, None)  # one that is made anew comes last: who was first is read off the order
        self._records[record.key] = record
        if record.error is None:
            self._answers.setdefault((record.task, record.prompt, record.turn), record.text)
            self._judge.learn(record)


def _is_done(keys: Sequence[Key], records: Mapping[Key, RequestRecord]) -> bool:
    return all(key in records and records[key].error is None for key in keys)


def _listed(methods: Sequence[Method], before: Manifest | None) -> list[dict[str, Any]]:
    """Those of this start, and those of an earlier one that are not there now: peers that have gone."""
    found = [method.as_dict() for method in methods]
    labels = {method.label for method in methods}
    return found + [method for method in (before.methods if before else []) if method["label"] not in labels]


def _record(key: Key, answer: Answer, batch: str) -> RequestRecord:
    return RequestRecord(
        **key._asdict(),
        batch=batch,
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


def _error_record(job: Job, prompt: TaskPrompt, why: str, turn: int = 0) -> RequestRecord:
    return RequestRecord(
        method=job.method.label, task=job.task, prompt=prompt.id, turn=turn, repeat=job.repeat, error=why
    )


def _continued(folder: Path, settings: Settings, tasks: Sequence[Task]) -> Manifest | None:
    """The run in this folder; None where there is none. Refuses to mix what does not belong together."""
    if not (folder / MANIFEST).exists():
        if folder.is_file():
            raise DraftwoodError("The place for the results is something else: this is a file", got=str(folder))
        if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise DraftwoodError(
                "The folder for the results holds something else", got=str(folder), next_step="Name a new folder."
            )
        return None
    manifest = read_manifest(folder)
    other = _changed(_as_json(settings.as_dict()), manifest.settings)
    other = other or _changed(
        {t.name: t.sha256 for t in tasks}, {n: t.get("sha256") for n, t in manifest.tasks.items()}
    )
    if other:
        raise DraftwoodError(
            f"The run in {folder} was made with other settings",
            got="different: " + ", ".join(other),
            next_step="Give the same ones to go on with it, or name a new folder.",
        )
    other = _changed(manifest.machine, _as_json(machine_facts())) + _changed(manifest.software, software_facts())
    if other:
        raise DraftwoodError(
            f"The run in {folder} was made on another machine or with other versions: times would not fit together",
            got="different: " + ", ".join(other),
            next_step="Go on where it was begun, or name a new folder.",
        )
    return manifest


def _changed(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in wanted if found.get(name) != wanted[name])


def _as_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """As it looks when it is read again: lists for tuples."""
    read: dict[str, Any] = json.loads(json.dumps(content))
    return read


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
