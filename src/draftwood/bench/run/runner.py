"""Runs a benchmark: every method on every prompt, interleaved, with each result written as it is finished.

An interrupted or killed run loses at most the current conversation or batch. Running it repeated with the same settings
and folder resumes it. Failed requests are recorded; a method that fails several times in a row is disabled.
"""

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
    BenchMethod,
    BenchRun,
    LoadMeter,
    RequestKey,
    RequestRecord,
    RunManifest,
    append_records,
    check_memories,
    describe_machine,
    describe_model,
    drop_partial_line,
    list_versions,
    lock_run,
    parse_methods,
    read_manifest,
    read_records,
    write_manifest,
    write_records,
)
from draftwood.bench.run.engines import BenchEngine, DrafterEngine, SampleResult
from draftwood.bench.run.lossless import LosslessJudge
from draftwood.bench.run.peer_engines import check_peers, longest_request, start_peers
from draftwood.bench.run.schedule import BenchJob, schedule
from draftwood.bench.settings import BenchSettings
from draftwood.bench.tasks import Task, TaskPrompt, load_tasks
from draftwood.config import SamplingParams
from draftwood.errors import DraftwoodError, PromptError
from draftwood.progress import Progress, report
from draftwood.prompts import prompt_ids
from draftwood.sizing import require_measured
from draftwood.targets import Loaded, load_target

MAX_FAILURES = 3  # in a row, before a method is disabled
WARM_UP_TOKENS = 16
Note = Callable[[str], None]
Answers = MutableMapping[tuple[str, str, int], str]  # by task, prompt, turn


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """What to run, where to write it, and further entries of the manifest."""

    settings: BenchSettings
    folder: Path
    command: str = ""
    recipe: str | None = None
    paper: list[dict[str, Any]] = field(default_factory=list)


def run_bench(spec: RunSpec, progress: Progress | None = None, note: Note | None = None) -> BenchRun:
    """Run what is missing and return the complete run."""
    with lock_run(spec.folder):
        prepared = prepare(spec, progress)
        drop_partial_line(spec.folder)
        return _run(spec, prepared, progress, note)


class PreparedRun(NamedTuple):
    """What a run needs besides the model."""

    methods: list[BenchMethod]  # without peers
    tasks: list[Task]
    before: RunManifest | None  # of the run to resume


def prepare(spec: RunSpec, progress: Progress | None = None) -> PreparedRun:
    """Load the prompts and reject what cannot run, as far as that is known without the model. Writes nothing."""
    settings = spec.settings
    methods = parse_methods(settings.drafters, settings.memory, settings.budget)
    check_memories(methods, settings.repeats)
    check_peers(settings)
    tasks = load_tasks(settings.tasks, settings.data, settings.limit, progress)
    return PreparedRun(methods, tasks, _read_resumed(spec.folder, settings, tasks))


def _run(spec: RunSpec, prepared: PreparedRun, progress: Progress | None, note: Note | None) -> BenchRun:
    settings = spec.settings
    methods, tasks, before = prepared
    loaded = load_target(settings.loading(), progress)
    longest = longest_request(tasks, loaded, settings) if settings.peers else 0  # only peers need it
    with ExitStack() as closing:
        if any(method.budget == "auto" for method in methods):
            require_measured(loaded.target, progress)
        peers, absent = start_peers(settings, loaded, longest, closing, progress)
        engines: dict[str, BenchEngine] = {}
        for method in methods:
            engine = DrafterEngine(method, loaded, settings.batch)
            closing.callback(engine.close)
            engines[method.label] = engine
        engines |= {method.label: peer for method, peer in peers}
        methods = [*methods, *(method for method, _ in peers)]
        if not methods:
            raise DraftwoodError("There is nothing to measure", got="; ".join(absent.values()))
        manifest = RunManifest(
            settings=_as_json(settings.as_dict()),
            methods=_list_methods(methods, before),
            tasks={t.name: {"prompts": len(t.prompts), "source": t.source, "sha256": t.sha256} for t in tasks},
            model=describe_model(loaded.target.info),
            machine=describe_machine(),
            software=list_versions(),
            command=spec.command,
            started=_now() if before is None else before.started,
            absent=absent,
            recipe=spec.recipe,
            paper=spec.paper,
        )
        write_manifest(spec.folder, manifest)
        return _Runner(spec, manifest, methods, tasks, loaded, engines, progress, note).run()


class _Runner:
    def __init__(
        self,
        spec: RunSpec,
        manifest: RunManifest,
        methods: Sequence[BenchMethod],
        tasks: Sequence[Task],
        loaded: Loaded,
        engines: Mapping[str, BenchEngine],
        progress: Progress | None,
        note: Note | None,
    ) -> None:
        self._settings, self._folder = spec.settings, spec.folder
        self._manifest = manifest
        self._loaded = loaded
        self._engines = engines
        self._progress, self._note = progress, note or (lambda text: None)
        self._jobs = schedule(tasks, methods, self._settings.batch, self._settings.repeats)
        self._judge = LosslessJudge(loaded, methods, is_greedy=self._settings.sampling().is_greedy)
        self._records: dict[RequestKey, RequestRecord] = {}  # in order of completion
        self._answers: Answers = {}  # of the first method to finish: the history of later turns
        self._failures: dict[str, list[str]] = {}  # consecutive errors by method
        self._open_jobs = self._resume(read_records(self._folder))

    def _resume(self, kept: Sequence[RequestRecord]) -> list[BenchJob]:
        """Load the records of an interrupted run and return the jobs that are left.

        A killed job may have written some of its records. The whole job is repeated, so these are dropped: later turns
        must refer to answers that stay in the file.
        """
        last = {record.key: record for record in kept}
        samples = self._settings.num_samples
        open_jobs = [job for job in self._jobs if not _is_done(job.keys(samples), last)]
        repeated = {key for job in open_jobs for key in job.keys(samples)}
        for record in kept:
            if record is last[record.key] and (record.error is not None or record.key not in repeated):
                self._add_record(record)
        return open_jobs

    def run(self) -> BenchRun:
        jobs, total = self._open_jobs, len(self._jobs)
        done = total - len(jobs)
        if done:
            self._note(f"resuming: {done} of {total} jobs are done")
            restarted = sorted({job.method.label for job in jobs if job.method.memory == "process"})
            if restarted:
                self._note(f"these methods lost their memory and start from scratch: {', '.join(restarted)}")
        if jobs:
            self._warm_up(jobs)
        meter = LoadMeter()
        label = f"measuring {len(self._engines)} method{'' if len(self._engines) == 1 else 's'}"
        for job in jobs:
            report(self._progress, label, done, total)
            if job.method.label not in self._manifest.failed:
                self._run_job(job)
            done += 1
        report(self._progress, label, 1, 1)
        return self._finish(None if self._settings.peers else meter.read())  # peers are processes of their own

    def _run_job(self, job: BenchJob) -> None:
        try:
            records = self._generate(job)
            if any(record.error is None for record in records):
                self._failures.pop(job.method.label, None)
        except Exception as error:  # noqa: BLE001 - one method's error must not stop the others
            records = self._record_failure(job, error)
        for record in records:
            self._add_record(record)
        append_records(self._folder, records)

    def _generate(self, job: BenchJob) -> list[RequestRecord]:
        engine = self._engines[job.method.label]
        params = self._params(job.repeat)
        batch = job.prompts[0].id if len(job.prompts) > 1 else ""
        answers: Answers = ChainMap({}, self._answers)  # other jobs see new answers once the whole job is done
        records = []
        prompts = list(job.prompts)
        for turn in range(1 if params.n > 1 else max(len(prompt.turns) for prompt in prompts)):
            encoded, errors = self._encode_turn(job, prompts, turn, answers)
            records += errors
            if not encoded:
                break
            prompts, ids = list(encoded), list(encoded.values())
            for prompt, sent, samples in zip(prompts, ids, engine.generate(ids, params), strict=True):
                answers.setdefault((job.task, prompt.id, turn), samples[0].text)
                for index, sample in enumerate(samples):
                    key = RequestKey(job.method.label, job.task, prompt.id, turn, index, job.repeat)
                    records.append(self._judge_record(_make_record(key, sample, batch), sent))
        return records

    def _encode_turn(
        self, job: BenchJob, prompts: Sequence[TaskPrompt], turn: int, answers: Answers
    ) -> tuple[dict[TaskPrompt, list[int]], list[RequestRecord]]:
        """Encode the prompts that have this turn; return error records for those that do not fit the context."""
        encoded: dict[TaskPrompt, list[int]] = {}
        errors = []
        for prompt in (prompt for prompt in prompts if turn < len(prompt.turns)):
            try:
                encoded[prompt] = self._encode(job.task, prompt, turn, answers)
            except PromptError as error:
                errors.append(_error_record(job, prompt, str(error), turn))
        return encoded, errors

    def _record_failure(self, job: BenchJob, error: Exception) -> list[RequestRecord]:
        label = job.method.label
        why = str(error) if isinstance(error, DraftwoodError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, PromptError):  # a bad prompt fails with every method
            self._count_failure(label, why)
        return [_error_record(job, prompt, why) for prompt in job.prompts]

    def _count_failure(self, label: str, why: str) -> None:
        """Report the first reason: once a peer has died, later errors only say that it is gone."""
        reasons = self._failures.setdefault(label, [])
        reasons.append(why)
        if len(reasons) >= MAX_FAILURES:
            self._manifest.failed[label] = reasons[0]
            write_manifest(self._folder, self._manifest)
            self._note(f"{label} is disabled after {len(reasons)} failures in a row: {reasons[0]}")

    def _finish(self, load: float | None) -> BenchRun:
        """Add the verdicts that waited for plain decoding, and rewrite the file without superseded records."""
        prompts = {(job.task, prompt.id): prompt for job in self._jobs for prompt in job.prompts}
        for key, record in self._records.items():
            if self._judge.can_judge(record):
                sent = self._encode(key.task, prompts[key.task, key.prompt], key.turn, self._answers)
                self._records[key] = self._judge.judge(record, sent)
        records = list(self._records.values())
        write_records(self._folder, records)
        known = [load for load in (self._manifest.other_load, load) if load is not None]
        manifest = replace(self._manifest, finished=_now(), other_load=max(known, default=None))
        write_manifest(self._folder, manifest)
        return BenchRun(self._folder.resolve().name, manifest, records)

    def _warm_up(self, jobs: Sequence[BenchJob]) -> None:
        """Run every method briefly on a reversed prompt, so that drafters learn nothing about the real one."""
        params = replace(self._params(0), max_tokens=min(WARM_UP_TOKENS, self._settings.max_tokens), n=1)
        methods = list(dict.fromkeys(job.method.label for job in jobs))
        messages = [{"role": "user", "content": jobs[0].prompts[0].turns[0]}]
        ids = prompt_ids(self._loaded.codec, messages, raw=self._settings.raw)[::-1][: self._max_context // 2]
        for number, label in enumerate(methods):
            report(self._progress, "warming up", number, len(methods))
            try:
                self._engines[label].warm_up([ids] * len(jobs[0].prompts), params)
            except Exception as error:  # noqa: BLE001 - the measured run counts failures
                self._note(f"warm-up of {label} failed: {error}")
        report(self._progress, "warming up", 1, 1)

    def _encode(self, task: str, prompt: TaskPrompt, turn: int, answers: Answers) -> list[int]:
        """Encode a turn with its history. All methods get the same history, from the first method that answered."""
        messages = []
        for number in range(turn):
            messages.append({"role": "user", "content": prompt.turns[number]})
            messages.append({"role": "assistant", "content": answers[task, prompt.id, number]})
        messages.append({"role": "user", "content": prompt.turns[turn]})
        ids = prompt_ids(self._loaded.codec, messages, raw=self._settings.raw)
        if len(ids) >= self._max_context:
            raise PromptError(
                "The prompt is longer than the context",
                got=f"{len(ids)} tokens",
                allowed=f"at most {self._max_context - 1}",
            )
        return ids

    @property
    def _max_context(self) -> int:
        """Maximum number of tokens of a prompt and its output."""
        return min(self._loaded.target.info.context_length, self._loaded.target.num_slots)

    def _params(self, repeat: int) -> SamplingParams:
        """Give every repeat its own seeds: a peer uses one per sample, starting at this one."""
        params = self._settings.sampling()
        return params if params.seed is None else replace(params, seed=params.seed + repeat * params.n)

    def _judge_record(self, record: RequestRecord, sent: list[int]) -> RequestRecord:
        return self._judge.judge(record, sent) if self._judge.can_judge(record) else record

    def _add_record(self, record: RequestRecord) -> None:
        self._records.pop(
            record.key, None
        )  # a repeated request moves to the end: the order tells which method was first
        self._records[record.key] = record
        if record.error is None:
            self._answers.setdefault((record.task, record.prompt, record.turn), record.text)
            self._judge.learn(record)


def _is_done(keys: Sequence[RequestKey], records: Mapping[RequestKey, RequestRecord]) -> bool:
    return all(key in records and records[key].error is None for key in keys)


def _list_methods(methods: Sequence[BenchMethod], before: RunManifest | None) -> list[dict[str, Any]]:
    """List the methods, and those of the interrupted run that are missing now, such as uninstalled peers."""
    found = [method.as_dict() for method in methods]
    labels = {method.label for method in methods}
    return found + [method for method in (before.methods if before else []) if method["label"] not in labels]


def _make_record(key: RequestKey, sample: SampleResult, batch: str) -> RequestRecord:
    return RequestRecord(
        **key._asdict(),
        batch=batch,
        prompt_tokens=sample.prompt_tokens,
        output_tokens=len(sample.token_ids),
        decode_tokens=sample.decode_tokens,
        decode_seconds=sample.decode_seconds,
        total_seconds=sample.total_seconds,
        first_token_seconds=sample.first_token_seconds,
        peak_bytes=sample.peak_bytes,
        finish_reason=sample.finish_reason,
        token_ids=sample.token_ids,
        text=sample.text,
        stats=sample.stats,
    )


def _error_record(job: BenchJob, prompt: TaskPrompt, why: str, turn: int = 0) -> RequestRecord:
    return RequestRecord(
        method=job.method.label, task=job.task, prompt=prompt.id, turn=turn, repeat=job.repeat, error=why
    )


def _read_resumed(folder: Path, settings: BenchSettings, tasks: Sequence[Task]) -> RunManifest | None:
    """Read the manifest of the run to resume; None for a new run. Raises if settings, machine or versions differ."""
    if not (folder / MANIFEST).exists():
        if folder.is_file():
            raise DraftwoodError("The results folder is a file", got=str(folder))
        if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise DraftwoodError(
                "The results folder contains other files", got=str(folder), next_step="Choose a new folder."
            )
        return None
    manifest = read_manifest(folder)
    differences = _find_differences(_as_json(settings.as_dict()), manifest.settings)
    differences = differences or _find_differences(
        {t.name: t.sha256 for t in tasks}, {n: t.get("sha256") for n, t in manifest.tasks.items()}
    )
    if differences:
        raise DraftwoodError(
            f"The run in {folder} has different settings",
            got="different: " + ", ".join(differences),
            next_step="Use the same settings to resume it, or choose a new folder.",
        )
    differences = _find_differences(manifest.machine, _as_json(describe_machine()))
    differences += _find_differences(manifest.software, list_versions())
    if differences:
        raise DraftwoodError(
            f"The run in {folder} is from another machine or has other versions: its times are not comparable",
            got="different: " + ", ".join(differences),
            next_step="Resume it on the original machine, or choose a new folder.",
        )
    return manifest


def _find_differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in wanted if found.get(name) != wanted[name])


def _as_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """Convert to what JSON reads back: lists instead of tuples."""
    read: dict[str, Any] = json.loads(json.dumps(content))
    return read


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
