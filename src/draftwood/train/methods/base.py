"""The contract of a training method."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from draftwood.errors import OptionError
from draftwood.heads import Head, HeadConfig
from draftwood.progress import Progress
from draftwood.train.base import Batch, Example, Losses, Signals
from draftwood.train.frozen import FrozenTarget


class Method(ABC):
    """A training method: computes the losses of a head. Built once per run.

        method = method_class("hass")(options, head, frozen, seed)
        method.begin_step(step, num_steps)                     # before the micro-batches of an optimiser step
        losses = method.losses(batch, signals)

    Randomness depends only on the seed, the step and the text, not on earlier steps or on the batch of a text. In
    evaluation mode (``head.eval()``) nothing is random.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]  # kinds of heads that it trains; the first one is the default
    needs_trained_head: ClassVar[bool] = False  # whether it needs an already trained head
    Options: ClassVar[type[Any]]

    checkpoints: bool = False  # activation checkpointing
    block: int | None = None  # positions whose logits are computed at once; None: automatic

    def __init__(self, options: Any, head: Head, frozen: FrozenTarget, seed: int = 0) -> None:
        self.check_kind(head.config.kind)
        self.options = options
        self.head = head
        self.frozen = frozen
        self.seed = seed
        self.step = 0
        self.num_steps = 0  # 0: unknown

    @classmethod
    def check_kind(cls, kind: str) -> None:
        if kind not in cls.kinds:
            raise OptionError(
                f"The method {cls.name!r} does not train heads of this kind",
                got=f"head.kind = {kind!r}",
                allowed=cls.kinds,
            )

    @classmethod
    def outputs_per_position(cls, options: Any, head: HeadConfig) -> int:
        """Return the number of head outputs per position, for memory estimates."""
        return 1

    @classmethod
    def scores_per_position(cls, options: Any, head: HeadConfig, length: int) -> int:
        """Return the attention scores per position that are in memory at once, for memory estimates."""
        return 0

    def prepare(self, batches: Sequence[Sequence[Example]], progress: Progress) -> None:
        """Do what can be done before the first step, outside the time of training. ``batches``: all training texts."""

    def begin_step(self, step: int, num_steps: int) -> None:
        """Start optimiser step ``step`` (from 0) of ``num_steps``. Schedules of a method depend on it."""
        self.step = step
        self.num_steps = num_steps

    @abstractmethod
    def losses(self, batch: Batch, signals: Signals) -> Losses: ...
