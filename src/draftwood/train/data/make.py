"""Making training data: prompts are read, the target answers them, shard by shard.

    prepared = prepare(settings, folder)                   # refuses what cannot be done; needs no model
    manifest = make_data(prepared, load_target(...))

Every request has a seed of its own, and every shard starts with an empty engine. So a run that was stopped and goes on
makes the same bytes as one that was not, as far as the target itself gives the same bits twice.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from draftwood.disk import lock_entry
from draftwood.drafters import check_drafter, drafter_class
from draftwood.errors import OptionError, PromptError
from draftwood.progress import Progress, report
from draftwood.targets import Loaded
from draftwood.train.data.answers import Answerer, Heard
from draftwood.train.data.dialogue import EMPTY, Dialogue, Kept, Rules, SelfMade
from draftwood.train.data.manifest import MANIFEST, Manifest, about_model, check_same_run, read_manifest, write_manifest
from draftwood.train.data.prompts import Prompt, Source, read_sources
from draftwood.train.data.settings import DataSettings
from draftwood.train.data.shards import Counts, Shard, read_shard, shard_name, write_shard
from draftwood.train.data.transcript import empty_user_turn

LABEL = "answering prompts"


class Prepared(NamedTuple):
    settings: DataSettings
    folder: Path
    prompts: list[Prompt]  # of the files
    sources: list[Source]

    @property
    def total(self) -> int:
        return len(self.prompts) + self.settings.self_made


def _check_drafter(name: str) -> None:
    """Drafters that need a head or a model would have to be told which."""
    drafter_class(name)
    try:
        check_drafter(name, None)
    except OptionError as error:
        raise OptionError("This drafter cannot write training data", got=f"{name}: {error.what}") from error


def prepare(settings: DataSettings, folder: str | Path) -> Prepared:
    """Reads the prompts, and refuses what cannot be done as far as that can be told without the model."""
    place = Path(folder)
    _check_drafter(settings.drafter)
    _check_folder(place)
    prompts, sources = read_sources(settings.files, settings.limit, keep_answers=settings.keep_answers)
    return Prepared(settings, place, prompts, sources)


def make_data(
    prepared: Prepared, loaded: Loaded, progress: Progress | None = None, heard: Heard | None = None
) -> Manifest:
    """Makes what is not there yet. ``heard`` is told how many tokens were written, whenever some were.

    A prompt that leaves no room for an answer is left out and counted; so is a self-made one that is empty.
    """
    folder = prepared.folder
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    with lock_entry(f"training-data-{name}", progress):
        rules = _rules(prepared.settings, loaded)
        manifest = _begin(prepared, rules, loaded)
        _sweep(folder)
        answerer = Answerer(loaded, prepared.settings.drafter, prepared.settings.batch, progress)
        shards = list(_shards(prepared, rules, manifest.run_id, answerer, progress, heard))
        manifest = replace(
            manifest,
            complete=True,
            counts=_total(prepared, shards),
            shards=[shard.counts() for shard in shards],
        )
        if not manifest.counts["examples"]:
            raise PromptError(
                "No prompt leaves room for an answer",
                got=f"{prepared.total} prompts, texts of at most {rules.max_length} tokens",
                next_step=_more_room(rules, loaded),
            )
        write_manifest(folder, manifest)
        return manifest


def _rules(settings: DataSettings, loaded: Loaded) -> Rules:
    room = min(loaded.target.info.context_length, loaded.target.num_slots)
    if settings.max_length is not None and settings.max_length > room:
        raise OptionError(
            "Texts cannot be longer than the context of the model and its cache",
            got=f"max_length {settings.max_length}",
            allowed=f"at most {room}",
        )
    opening = empty_user_turn(loaded.codec) if settings.self_made else []
    return Rules(settings, loaded.codec, settings.max_length or room, opening)


def _more_room(rules: Rules, loaded: Loaded) -> str:
    """What can be raised: the context of a model cannot."""
    context, slots = loaded.target.info.context_length, loaded.target.num_slots
    if rules.max_length < min(context, slots):
        return "Raise --max-length, or give shorter prompts."
    return "Raise --cache-tokens, or give shorter prompts." if slots < context else "Give shorter prompts."


def _begin(prepared: Prepared, rules: Rules, loaded: Loaded) -> Manifest:
    """The manifest of this run, in its folder; refuses a folder of another run."""
    manifest = Manifest(
        model=about_model(loaded.target),
        settings={**prepared.settings.recorded(), "max_length": rules.max_length},
        sources=[source._asdict() for source in prepared.sources],
        prompts=prepared.total,
        licence=prepared.settings.licence,
    )
    if (prepared.folder / MANIFEST).exists():
        before = read_manifest(prepared.folder)
        check_same_run(prepared.folder, before, manifest)
        if not manifest.licence:
            manifest = replace(manifest, licence=before.licence)
    else:
        write_manifest(prepared.folder, manifest)
    return manifest


def _shards(
    prepared: Prepared,
    rules: Rules,
    run: str,
    answerer: Answerer,
    progress: Progress | None,
    heard: Heard | None,
) -> Iterator[Shard]:
    """All of them: read where they are there, made where not."""
    size, total = prepared.settings.shard_size, prepared.total
    done = 0

    def tell(tokens: int) -> None:
        if heard is not None:
            heard(tokens)
        report(progress, LABEL, done, total)

    def ended() -> None:
        nonlocal done
        done += 1

    for number, start in enumerate(range(0, total, size)):
        path = prepared.folder / shard_name(number)
        if path.exists():
            yield read_shard(path, number, run)
            done = min(start + size, total)
            continue
        dialogues = [_dialogue(prepared, rules, index) for index in range(start, min(start + size, total))]
        report(progress, LABEL, done, total)
        answerer.run(dialogues, tell, ended)
        shard = _shard(dialogues)
        write_shard(path, shard, number, run)
        yield shard
    report(progress, LABEL, total, total)


def _dialogue(prepared: Prepared, rules: Rules, index: int) -> Dialogue:
    if index >= len(prepared.prompts):
        return SelfMade(index, index - len(prepared.prompts), rules)
    kind = Kept if prepared.settings.keep_answers else Dialogue
    return kind(index, prepared.prompts[index], rules)


def _shard(dialogues: list[Dialogue]) -> Shard:
    examples = [(dialogue.index, example) for dialogue in dialogues for example in dialogue.transcript.examples()]
    return Shard.of(examples, Counter(dialogue.lost for dialogue in dialogues if dialogue.lost is not None))


def _total(prepared: Prepared, shards: list[Shard]) -> Counts:
    counts: Counter[str] = Counter({EMPTY: sum(source.skipped for source in prepared.sources)})
    for shard in shards:
        counts.update(shard.counts())
        counts.update(shard.lost)
    return dict(sorted(counts.items()))


def _check_folder(folder: Path) -> None:
    """A folder of ours, or one to be made; nobody's files get others among them."""
    if folder.exists() and not folder.is_dir():
        raise OptionError("Training data goes into a folder, and this is a file", got=folder)
    if folder.is_dir() and not (folder / MANIFEST).exists() and any(folder.iterdir()):
        raise OptionError("The folder has other things in it", got=folder, next_step="Name a new or an empty one.")


def _sweep(folder: Path) -> None:
    """Removes what a killed run left half written; nobody else writes here while the lock is held."""
    for leftover in folder.glob(".*.partial-*"):
        with suppress(OSError):
            leftover.unlink()
