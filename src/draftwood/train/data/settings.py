"""What is asked of ``draftwood train data``: which prompts, how they are answered, how the answers are kept."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from draftwood.config import SamplingParams, whole
from draftwood.errors import OptionError

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """One set of training data. What changes the answers is written into the manifest; ``batch`` is not among it."""

    files: tuple[str, ...] = ()  # of prompts
    self_made: int = 0  # prompts that the target writes itself
    limit: int | None = None  # of the files' prompts only the first so many
    keep_answers: bool = False  # the files' own answers, which this very model wrote elsewhere
    max_tokens: int = 512  # of an answer
    max_length: int | None = None  # of a text, prompt and answers; None: the context of the model
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    prompt_tokens: int = 256  # of a self-made prompt
    prompt_temperature: float = 1.0
    prompt_top_p: float = 0.95
    drafter: str = "plain"  # in large batches drafts seldom pay
    batch: int = 64  # answers that are written together
    shard_size: int = 1024  # prompts; a run that is stopped loses at most one shard
    licence: str = ""  # a note on what may be done with the data

    def __post_init__(self) -> None:
        for name in ("limit", "max_length"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        for name in ("prompt_tokens", "batch", "shard_size"):
            whole(name, getattr(self, name), 1)
        whole("self_made", self.self_made, 0)
        whole("seed", self.seed, 0, MAX_SEED)
        if not self.files and not self.self_made:
            raise OptionError("There is nothing to answer", next_step="Name files of prompts, or add --self N.")
        if self.keep_answers and not self.files:
            raise OptionError("Answers can be kept from files only", next_step="Name files of conversations.")
        _ = self.answering(0), self.asking(0)  # they refuse what makes no sense

    def answering(self, seed: int, room: int | None = None) -> SamplingParams:
        """How an answer is written, with no more tokens than there is ``room`` for."""
        most = self.max_tokens if room is None else min(self.max_tokens, room)
        return SamplingParams(max_tokens=most, temperature=self.temperature, top_p=self.top_p, seed=seed)

    def asking(self, seed: int) -> SamplingParams:
        """How a self-made prompt is written."""
        if self.prompt_temperature == 0.0:
            raise OptionError("Self-made prompts would all be the same", got="prompt_temperature 0", allowed="above 0")
        return SamplingParams(
            max_tokens=self.prompt_tokens,
            temperature=self.prompt_temperature,
            top_p=self.prompt_top_p,
            seed=seed,
        )

    def recorded(self) -> dict[str, Any]:
        """What the answers depend on, beside the model and the contents of the files."""
        beside = ("files", "batch", "licence")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in beside}
