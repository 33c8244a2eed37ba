"""The contract of a training method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from draftwood.errors import OptionError
from draftwood.heads import Head, HeadConfig
from draftwood.train.base import Batch, Losses, Signals
from draftwood.train.frozen import FrozenTarget


class Method(ABC):
    """How a head is trained. Built once for a run; options are its own record.

        method = method_class("hass")(options, head, frozen, seed)
        method.begin_step(step, num_steps)                     # before the batches of an optimiser step
        losses = method.losses(batch, signals)

    What is random follows from the seed, the step and the text alone: neither from what ran before nor from the batch
    a text is in. A head in evaluation mode (``head.eval()``) sees nothing random.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]  # of heads that it trains
    goes_on: ClassVar[bool] = False  # whether it makes a trained head better, and cannot begin with a new one
    Options: ClassVar[type[Any]]

    checkpoints: bool = False  # whether what lies between is computed again on the way back, to save memory
    block: int | None = None  # positions whose logits over the vocabulary are computed together; None: as many as fit

    def __init__(self, options: Any, head: Head, frozen: FrozenTarget, seed: int = 0) -> None:
        self.check_kind(head.config.kind)
        self.options = options
        self.head = head
        self.frozen = frozen
        self.seed = seed
        self.step = 0
        self.num_steps = 0  # 0: not known

    @classmethod
    def check_kind(cls, kind: str) -> None:
        if kind not in cls.kinds:
            raise OptionError(f"The method {cls.name!r} does not train heads of this kind", got=kind, allowed=cls.kinds)

    @classmethod
    def outputs_per_position(cls, options: Any, head: HeadConfig) -> int:
        """Outputs of the head that a position leads to, for estimates of memory."""
        return 1

    @classmethod
    def scores_per_position(cls, options: Any, head: HeadConfig, length: int) -> int:
        """Attention scores that are held at once, by position of texts of such a length; also for estimates."""
        return 0

    def begin_step(self, step: int, num_steps: int) -> None:
        """What changes as training goes on follows from this: optimiser step ``step``, from 0, of ``num_steps``."""
        self.step = step
        self.num_steps = num_steps

    @abstractmethod
    def losses(self, batch: Batch, signals: Signals) -> Losses: ...
