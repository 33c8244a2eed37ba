"""Settings of a benchmark, from the command line or a recipe, validated on construction."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from draftwood.config import DEFAULT_MEMORY, DEFAULT_MODEL, ModelOptions, SamplingParams, from_mapping, whole
from draftwood.errors import OptionError

DEFAULT_METHODS = ("plain", "pld", "recycling", "goose")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSettings:
    """Everything that determines what a run measures. Runs with equal settings can be resumed and pooled."""

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    quantize: str | None = None  # 8-bit weight format
    exact: bool = False  # same bits for a token in every pass
    device: str = "auto"
    target: str = "auto"
    drafters: tuple[str, ...] = DEFAULT_METHODS  # see methods.py
    peers: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()  # empty: all available
    data: str | None = None  # a folder of prompt files, "hub", or None for the bundled prompts
    limit: int | None = None  # prompts per task
    budget: tuple[int | str, ...] = ("auto",)
    memory: str = DEFAULT_MEMORY
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = False
    repeats: int = 1  # runs of every method on every prompt
    trajectories: tuple[int, ...] = (1,)  # samples per prompt, generated in sequence with one memory
    batch: int = 1  # prompts per batch
    raw: bool = False  # continue the prompt as text, without a chat template

    def __post_init__(self) -> None:
        for f in fields(self):  # JSON and TOML give lists
            value = getattr(self, f.name)
            if isinstance(value, list):
                object.__setattr__(self, f.name, tuple(value))
        for name in ("limit", "repeats", "batch"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        if not self.trajectories or any(type(count) is not int or count < 1 for count in self.trajectories):
            raise OptionError(
                "trajectories must be numbers of samples",
                got=",".join(map(str, self.trajectories)) or "none",
                allowed="for example 1,4,8,16",
            )
        whole("seed", self.seed, 0)
        if len(set(self.budget)) < len(self.budget):
            raise OptionError("A budget is listed twice", got=",".join(map(str, self.budget)))
        if not self.budget:
            raise OptionError("A budget is required", allowed="positions per pass, or auto, as in 8,16,auto")
        self.loading()
        self.sampling()
        if max(self.trajectories) > 1 and self.temperature == 0.0:
            raise OptionError(
                "Greedy trajectories of one prompt are all identical",
                got=f"trajectories {','.join(map(str, self.trajectories))}, temperature 0",
                next_step="Add --temperature 0.6, for instance.",
            )
        if not self.drafters and not self.peers:
            raise OptionError("There is nothing to measure", next_step="List methods: --drafters plain,goose.")

    @property
    def num_samples(self) -> int:
        return max(self.trajectories)

    def loading(self) -> ModelOptions:
        return ModelOptions(
            model=self.model,
            dtype=self.dtype,
            quantize=self.quantize,
            exact=self.exact,
            device=self.device,
            target=self.target,
            max_batch=self.batch,
        )

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            ignore_eos=self.ignore_eos,
            seed=self.seed if self.temperature else None,
            n=self.num_samples,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return from_mapping(cls, values, "A benchmark")


def split_methods(text: str) -> list[str]:
    """Split at commas. Options contain commas too: a piece ``KEY=VALUE`` belongs to the method before it."""
    methods: list[str] = []
    for piece in filter(None, (part.strip() for part in text.split(","))):
        if methods and "=" in piece and ":" not in piece.split("=", 1)[0]:
            methods[-1] += f",{piece}"
        else:
            methods.append(piece)
    return methods
