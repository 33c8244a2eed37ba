"""Make training data: read prompts and let the target answer them, shard by shard.

    prepared = prepare(settings, folder)                   # checks everything that needs no model
    manifest = make_data(prepared, load_target(...))

Every request has its own seed, and every shard starts with an empty engine. An interrupted and resumed run therefore
writes the same bytes as an uninterrupted one, as far as the target is deterministic. For the same reason several
processes, on one or more machines that share the folder, can each make a part of the shards.
"""

import hashlib
import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

from draftwood.disk import lock_entry
from draftwood.drafters import check_drafter, drafter_class
from draftwood.errors import OptionError, PromptError
from draftwood.progress import Progress, report
from draftwood.targets import Loaded
from draftwood.train.data.answers import Answerer, OnTokens
from draftwood.train.data.dialogue import EMPTY, Dialogue, Kept, Rules, SelfMade
from draftwood.train.data.manifest import (
    MANIFEST,
    Manifest,
    check_same_run,
    describe_model,
    read_manifest,
    write_manifest,
)
from draftwood.train.data.prompts import Prompt, Source, read_sources
from draftwood.train.data.shards import Counts, Shard, read_shard, shard_name, write_shard
from draftwood.train.data.transcript import find_opening
from draftwood.train.data_settings import DataSettings

LABEL = "answering prompts"


class Part(NamedTuple):
    """Which shards a process makes: every ``total``-th one, from the ``number``-th on."""

    number: int = 1
    total: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "2/4"."""
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise OptionError("part must be a number and how many there are", got=repr(text), allowed="as in 2/4")
        return cls(int(number), int(count))


class Prepared(NamedTuple):
    settings: DataSettings
    folder: Path
    prompts: list[Prompt]  # from files
    sources: list[Source]
    part: Part = Part()

    @property
    def total(self) -> int:
        return len(self.prompts) + self.settings.self_made

    @property
    def num_shards(self) -> int:
        return -(-self.total // self.settings.shard_size)

    @property
    def own_shards(self) -> range:
        return range(self.part.number - 1, self.num_shards, self.part.total)

    def rows(self, shard: int) -> range:
        """The prompts of a shard."""
        start = shard * self.settings.shard_size
        return range(start, min(start + self.settings.shard_size, self.total))


def _check_drafter(name: str) -> None:
    """Raise an error for drafters that need a head or a model, which cannot be given here."""
    drafter_class(name)
    try:
        check_drafter(name, None)
    except OptionError as error:
        raise OptionError("This drafter cannot write training data", got=f"{name}: {error.what}") from error


def prepare(settings: DataSettings, folder: str | Path, part: Part | None = None) -> Prepared:
    """Read the prompts and check everything that can be checked without the model."""
    place = Path(folder)
    _check_drafter(settings.drafter)
    _check_folder(place)
    prompts, sources = read_sources(settings.files, settings.limit, keep_answers=settings.keep_answers)
    prepared = Prepared(settings, place, prompts, sources, part or Part())
    if not prepared.own_shards:
        raise OptionError(
            "There are more parts than shards",
            got=f"part {prepared.part.number} of {prepared.part.total}, {prepared.num_shards} shards",
            next_step=f"Use --shard-size {-(-prepared.total // prepared.part.total)} or less in all parts.",
        )
    return prepared


def make_data(
    prepared: Prepared, loaded: Loaded, progress: Progress | None = None, on_tokens: OnTokens | None = None
) -> Manifest:
    """Make the missing shards of this part. ``on_tokens`` is called with the number of new tokens.

    Prompts that leave no room for an answer and empty self-made prompts are skipped and counted. The manifest is
    complete once all parts are.
    """
    folder = prepared.folder
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    with lock_entry(f"training-data-{name}-{prepared.part.number}-{prepared.part.total}", progress):
        rules = _make_rules(prepared.settings, loaded)
        manifest = _open_manifest(prepared, rules, loaded)
        _remove_partial_files(prepared)
        answerer = Answerer(loaded, prepared.settings.drafter, prepared.settings.batch, progress)
        _make_shards(prepared, rules, manifest.run_id, answerer, progress, on_tokens)
        paths = [folder / shard_name(number) for number in range(prepared.num_shards)]
        if not all(path.exists() for path in paths):
            return manifest  # the process that makes the last one completes it
        shards = [read_shard(path, number, manifest.run_id) for number, path in enumerate(paths)]
        manifest = replace(
            manifest, complete=True, counts=_count_total(prepared, shards), shards=[shard.counts() for shard in shards]
        )
        if not manifest.counts["examples"]:
            raise PromptError(
                "No prompt leaves room for an answer",
                got=f"{prepared.total} prompts, texts of at most {rules.max_length} tokens",
                next_step=_advise_on_room(rules, loaded),
            )
        write_manifest(folder, manifest)
        return manifest


def _make_rules(settings: DataSettings, loaded: Loaded) -> Rules:
    room = min(loaded.target.info.context_length, loaded.target.num_slots)
    if settings.max_length is not None and settings.max_length > room:
        raise OptionError(
            "Texts cannot be longer than the context of the model and its cache",
            got=f"max_length {settings.max_length}",
            allowed=f"at most {room}",
        )
    opening = find_opening(loaded.codec) if settings.self_made else []
    return Rules(settings, loaded.codec, settings.max_length or room, opening)


def _advise_on_room(rules: Rules, loaded: Loaded) -> str:
    """Return advice: which option to raise."""
    context, slots = loaded.target.info.context_length, loaded.target.num_slots
    if rules.max_length < min(context, slots):
        return "Raise --max-length, or use shorter prompts."
    return "Raise --cache-tokens, or use shorter prompts." if slots < context else "Use shorter prompts."


def _open_manifest(prepared: Prepared, rules: Rules, loaded: Loaded) -> Manifest:
    """Write or check the manifest of this run. Raise an error if the folder belongs to another run."""
    manifest = Manifest(
        model=describe_model(loaded.target),
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


def _make_shards(
    prepared: Prepared,
    rules: Rules,
    run: str,
    answerer: Answerer,
    progress: Progress | None,
    on_tokens: OnTokens | None,
) -> None:
    """Check existing shards of this part and make missing ones."""
    total = sum(len(prepared.rows(number)) for number in prepared.own_shards)
    done = 0

    def on_new_tokens(tokens: int) -> None:
        if on_tokens is not None:
            on_tokens(tokens)
        report(progress, LABEL, done, total)

    def on_end() -> None:
        nonlocal done
        done += 1

    for number in prepared.own_shards:
        path, rows = prepared.folder / shard_name(number), prepared.rows(number)
        if path.exists():
            read_shard(path, number, run)
            done += len(rows)
            continue
        dialogues = [_make_dialogue(prepared, rules, index) for index in rows]
        report(progress, LABEL, done, total)
        answerer.run(dialogues, on_new_tokens, on_end)
        write_shard(path, _make_shard(dialogues), number, run)
    report(progress, LABEL, total, total)


def _make_dialogue(prepared: Prepared, rules: Rules, index: int) -> Dialogue:
    if index >= len(prepared.prompts):
        return SelfMade(index, index - len(prepared.prompts), rules)
    kind = Kept if prepared.settings.keep_answers else Dialogue
    return kind(index, prepared.prompts[index], rules)


def _make_shard(dialogues: list[Dialogue]) -> Shard:
    examples = [(dialogue.index, example) for dialogue in dialogues for example in dialogue.transcript.examples()]
    return Shard.of(examples, Counter(dialogue.lost for dialogue in dialogues if dialogue.lost is not None))


def _count_total(prepared: Prepared, shards: list[Shard]) -> Counts:
    counts: Counter[str] = Counter({EMPTY: sum(source.skipped for source in prepared.sources)})
    for shard in shards:
        counts.update(shard.counts())
        counts.update(shard.lost)
    return dict(sorted(counts.items()))


def _check_folder(folder: Path) -> None:
    """Raise an error for a folder with other files, which must not be mixed with training data."""
    if folder.exists() and not folder.is_dir():
        raise OptionError("Training data needs a folder, and this is a file", got=folder)
    if folder.is_dir() and not (folder / MANIFEST).exists() and any(folder.iterdir()):
        raise OptionError("The folder has other things in it", got=folder, next_step="Use a new or an empty folder.")


def _remove_partial_files(prepared: Prepared) -> None:
    """Remove partial files of a killed run. The lock ensures that no other process writes them."""
    for number in prepared.own_shards:
        for leftover in prepared.folder.glob(f".{shard_name(number)}.partial-*"):
            with suppress(OSError):
                leftover.unlink()
