"""Reading training data: examples by number, a part of them for validation, and batches of similar lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood.config import whole
from draftwood.errors import OptionError
from draftwood.targets import Target
from draftwood.train.base import Example
from draftwood.train.data.manifest import Manifest, read_manifest
from draftwood.train.data.shards import DataError, Shard, damaged, read_shard, shard_name

POOL = 4096  # examples that are sorted by length together
SPREAD = 0.1  # of a length: so far apart may be what is batched together, or batches would be the same in every epoch

Int64s = npt.NDArray[np.int64]


class Folder(NamedTuple):
    """Where texts come from."""

    place: Path
    manifest: Manifest


class TrainingData:
    """Texts that the target wrote, all in memory: five bytes a token."""

    def __init__(
        self,
        folders: Sequence[Folder],
        token_ids: npt.NDArray[np.int32],
        answered: npt.NDArray[np.bool_],
        starts: Int64s,
        lengths: Int64s,
        prompts: Int64s,
    ) -> None:
        self.folders = tuple(folders)
        self.lengths = lengths  # [n] tokens of each text
        self.prompts = prompts  # [n] which prompt of the folders each text comes from
        self._token_ids = token_ids  # [total]
        self._answered = answered  # [total]
        self._starts = starts  # [n]

    @classmethod
    def open(cls, *folders: str | Path, max_length: int | None = None) -> TrainingData:
        """All shards of the folders, each of them checked.

        ``max_length``: of longer texts only the beginning; those that have no answer left are left out.
        """
        data = cls._together([cls._open(Path(folder)) for folder in folders])
        return data if max_length is None else data._cut(max_length)

    @classmethod
    def _open(cls, place: Path) -> TrainingData:
        manifest = read_manifest(place)
        if not manifest.complete:
            raise DataError(
                f"The training data in {place} is not complete",
                next_step="Give the command that made it again: it goes on from where it was stopped.",
            )
        shards = [read_shard(place / shard_name(n), n, manifest.run_id) for n in range(manifest.num_shards)]
        data = cls._joined(Folder(place, manifest), shards)
        if data._token_ids.size and not 0 <= data._token_ids.min() <= data._token_ids.max() < data.vocab_size:
            raise damaged(place, "it has tokens outside the vocabulary")
        return data

    @classmethod
    def _joined(cls, folder: Folder, shards: list[Shard]) -> TrainingData:
        offsets = [shard.offsets for shard in shards]
        begins = np.cumsum([0, *(part[-1] for part in offsets)])  # of the shards
        return cls(
            [folder],
            np.concatenate([shard.token_ids for shard in shards]),
            np.concatenate([shard.answered for shard in shards]).view(np.bool_),
            np.concatenate([begin + part[:-1] for begin, part in zip(begins, offsets, strict=False)]),
            np.concatenate([np.diff(part) for part in offsets]),
            np.concatenate([shard.prompts for shard in shards]),
        )

    @classmethod
    def _together(cls, parts: Sequence[TrainingData]) -> TrainingData:
        tokens = np.cumsum([0, *(len(part._token_ids) for part in parts)])  # before each part
        prompts = np.cumsum([0, *(part.folders[0].manifest.prompts for part in parts)])
        return cls(
            [folder for part in parts for folder in part.folders],
            np.concatenate([part._token_ids for part in parts]),
            np.concatenate([part._answered for part in parts]),
            np.concatenate([before + part._starts for before, part in zip(tokens, parts, strict=False)]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([before + part.prompts for before, part in zip(prompts, parts, strict=False)]),
        )

    @property
    def vocab_size(self) -> int:
        """Of the target that wrote the texts."""
        return int(self.folders[0].manifest.model["vocab_size"])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        place = slice(self._starts[index], self._starts[index] + self.lengths[index])
        return Example(self._token_ids[place], self._answered[place])

    def examples(self, batch: Sequence[int]) -> list[Example]:
        """Those of one of the ``batches``."""
        return [self[index] for index in batch]

    def shuffled(self, seed: int = 0) -> list[Example]:
        """All of them, in an order that mixes the folders: the first ones are then like the rest."""
        return self.examples(np.random.default_rng(seed).permutation(len(self)).tolist())

    def prompt_ids(self, index: int) -> list[int]:
        """What stands before the first answer of a text: a request that can be made again."""
        token_ids, answered = self[index]
        ids: list[int] = token_ids[: int(answered.argmax())].tolist()
        return ids

    def check_model(self, target: Target) -> None:
        """Refuses a target other than the one that wrote the texts."""
        for place, manifest in self.folders:
            manifest.check_model(target, place)

    def split(self, validation: float, seed: int = 0) -> tuple[TrainingData, TrainingData]:
        """Texts to train on, and others to measure on: a share of the prompts (0.05) or a number of them (200).

        All texts of a prompt are on one side, however often it was answered. 0 leaves nothing for validation.
        """
        numbers = self._prompt_numbers()
        prompts = np.unique(numbers)
        is_share = isinstance(validation, float) and 0.0 < validation < 1.0
        number = max(1, round(validation * len(prompts))) if is_share else validation
        if not float(number).is_integer() or not 0 <= number < max(1, len(prompts)):
            raise OptionError(
                "This is no part of the prompts to validate on",
                got=validation,
                allowed=f"a share between 0 and 1, or a number below {len(prompts)}",
            )
        chosen = np.random.default_rng(seed).permutation(prompts)[: int(number)]
        held_out = np.isin(numbers, chosen)
        return self._selected(np.flatnonzero(~held_out)), self._selected(np.flatnonzero(held_out))

    def batches(
        self,
        max_tokens: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
    ) -> list[list[int]]:
        """The batches of an epoch, in order: numbers of examples of similar length, ``max_tokens`` with the padding.

        They are the same whatever the number of processes, which take them in turns: step s of ``world_size`` processes
        takes batches s * world_size to (s + 1) * world_size. Everybody gets the same number, so a few batches at the
        end may go unused. ``start``: so many of this process's batches are over already.
        """
        self.check_room(max_tokens)
        if not 0 <= rank < world_size:
            raise OptionError("There is no such process", got=f"rank {rank}", allowed=f"0 to {world_size - 1}")
        rng = np.random.default_rng((seed, epoch))
        found = [
            batch
            for pool in np.split(rng.permutation(len(self)), range(POOL, len(self), POOL))
            for batch in self._batched(pool, max_tokens, rng)
        ]
        usable = len(found) // world_size * world_size
        order = rng.permutation(len(found))[:usable]
        return [found[place] for place in order[rank::world_size][start:]]

    def check_room(self, max_tokens: int) -> None:
        """Refuses batches of so many tokens if one text alone has more."""
        if self.lengths.size and self.lengths.max() > max_tokens:
            raise OptionError(
                "A batch has no room for the longest text",
                got=f"{max_tokens} tokens a batch, a text of {self.lengths.max()}",
                next_step="Raise the tokens of a batch (run.max_tokens), or cut texts with max_length.",
            )

    def token_counts(self) -> tuple[Int64s, Int64s]:
        """How often the target wrote each token of its vocabulary, and how often it occurs at all, [V] each."""
        edges = np.zeros(len(self._token_ids) + 1, dtype=np.int32)
        edges[self._starts] += 1  # no two texts share their beginning, or their end
        edges[self._starts + self.lengths] -= 1
        inside = np.cumsum(edges[:-1]).astype(np.bool_)
        written = np.bincount(self._token_ids[inside & self._answered], minlength=self.vocab_size)
        return written, np.bincount(self._token_ids[inside], minlength=self.vocab_size)

    def _batched(self, pool: Int64s, max_tokens: int, rng: np.random.Generator) -> list[list[int]]:
        about = self.lengths[pool] * rng.uniform(1.0 - SPREAD, 1.0 + SPREAD, len(pool))
        batches: list[list[int]] = []
        longest = 0
        for index in pool[np.argsort(about, kind="stable")].tolist():
            longest = max(longest, int(self.lengths[index]))
            if not batches or longest * (len(batches[-1]) + 1) > max_tokens:
                batches.append([])
                longest = int(self.lengths[index])
            batches[-1].append(index)
        return batches

    def _prompt_numbers(self) -> Int64s:
        """Of each text the number of its prompt, which is one for prompts that are the same to the token. A prompt may
        have several texts: those behind its first, which may begin in any way, go where that goes."""
        first: dict[tuple[int, ...], int] = {}
        numbers: dict[int, int] = {}
        for place, prompt in enumerate(self.prompts.tolist()):
            begins = tuple(self.prompt_ids(place))
            number = numbers.setdefault(prompt, first.get(begins, prompt))
            first.setdefault(begins, number)
        return np.array([numbers[prompt] for prompt in self.prompts.tolist()], dtype=np.int64)

    def _cut(self, max_length: int) -> TrainingData:
        whole("max_length", max_length, 1)
        lengths = np.minimum(self.lengths, max_length)
        before = np.concatenate(([0], np.cumsum(self._answered)))  # answered tokens before each place
        has_answer = before[self._starts + lengths] > before[self._starts]
        parts = (self.folders, self._token_ids, self._answered, self._starts, lengths, self.prompts)
        return TrainingData(*parts)._selected(np.flatnonzero(has_answer))

    def _selected(self, indices: Int64s) -> TrainingData:
        return TrainingData(
            self.folders,
            self._token_ids,
            self._answered,
            self._starts[indices],
            self.lengths[indices],
            self.prompts[indices],
        )
