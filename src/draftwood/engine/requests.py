"""What is submitted to the engine, and the samples that it becomes."""

from dataclasses import dataclass

from draftwood.config import SamplingParams
from draftwood.drafters import DrafterFactory
from draftwood.structured import Structure


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One prompt and everything that decides how it is completed."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    drafter: DrafterFactory
    reuse: bool = False  # whether a cached prefix may replace prefill
    owner: str = ""  # whose prefixes and memory those are
    with_text: bool = True  # False: events carry empty texts, unless stop strings have to be searched for
    prediction: tuple[int, ...] = ()  # token ids of the predicted output; drafters that copy text copy from it
    structure: Structure | None = None  # what the output must match: ``params.structured``, compiled
    budget: int | None = None  # fixed number of positions per pass, at most those of the engine; None: as the engine
    with_cycles: bool = False  # whether events say how they came about, which reads all rows of the target


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One of the ``params.n`` samples of a request, with the limits that the engine sets."""

    request: GenerationRequest
    request_id: int
    group: int  # shared by the samples of one prompt
    index: int  # of the sample in its group
    max_tokens: int  # what was requested, reduced to what the context has room for
    budget: int  # positions per verification pass
    max_capacity: int  # positions of the whole cache
    prefill_chunk: int

    @property
    def capacity(self) -> int:
        """Cache positions that the sample can need, or all there are."""
        return min(len(self.request.prompt_ids) + self.max_tokens + self.budget, self.max_capacity)
