"""Settings of ``draftwood train data``: prompts, sampling of answers, storage."""

from dataclasses import dataclass, fields
from typing import Any

from draftwood.config import SamplingParams, whole
from draftwood.errors import OptionError

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """Settings of one data set. Everything that changes answers is recorded in the manifest; ``batch`` does not."""

    files: tuple[str, ...] = ()  # prompt files
    self_made: int = 0  # number of prompts that the target generates
    limit: int | None = None  # use only the first prompts of the files
    keep_answers: bool = False  # keep the answers of the files, which this model generated elsewhere
    max_tokens: int = 512  # maximum tokens per answer
    max_length: int | None = None  # maximum tokens per text (prompt and answers); None: the model's context
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    prompt_tokens: int = 256  # maximum tokens of a self-made prompt
    prompt_temperature: float = 1.0
    prompt_top_p: float = 0.95
    drafter: str = "plain"  # drafting seldom pays in large batches
    batch: int = 64  # answers that are generated at once
    shard_size: int = 1024  # prompts per shard; an interrupted run loses at most one shard
    licence: str = ""  # licence note for the data

    def __post_init__(self) -> None:
        for name in ("limit", "max_length"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        for name in ("prompt_tokens", "batch", "shard_size"):
            whole(name, getattr(self, name), 1)
        whole("self_made", self.self_made, 0)
        whole("seed", self.seed, 0, MAX_SEED)
        if not self.files and not self.self_made:
            raise OptionError("There is nothing to answer", next_step="Give files of prompts, or add --self N.")
        if self.keep_answers and not self.files:
            raise OptionError("Answers can be kept from files only", next_step="Give files of conversations.")
        _ = self.answering(0), self.asking(0)  # raise errors for invalid values

    def answering(self, seed: int, room: int | None = None) -> SamplingParams:
        """Return the sampling parameters of an answer of at most ``room`` tokens."""
        most = self.max_tokens if room is None else min(self.max_tokens, room)
        return SamplingParams(max_tokens=most, temperature=self.temperature, top_p=self.top_p, seed=seed)

    def asking(self, seed: int) -> SamplingParams:
        """Return the sampling parameters of a self-made prompt."""
        if self.prompt_temperature == 0.0:
            raise OptionError("Self-made prompts would all be the same", got="prompt_temperature 0", allowed="above 0")
        return SamplingParams(
            max_tokens=self.prompt_tokens, temperature=self.prompt_temperature, top_p=self.prompt_top_p, seed=seed
        )

    def recorded(self) -> dict[str, Any]:
        """Return what the answers depend on, besides the model and the files."""
        excluded = ("files", "batch", "licence")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in excluded}
