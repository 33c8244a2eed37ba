"""Plain decoding for transformers models that cannot run trees, mostly recurrent ones.

The target name "hf-plain" allows plain decoding if the model cannot run trees. A model that can run them still does,
and nothing here is used.

Chains only, with one forward per sequence. Each sequence holds the model's own cache object and continues from it by a
single token, a step that every model computes correctly (some, such as Mamba, are inexact for longer chunks). A further
chunk of a prompt, and the first step after a truncation, run the sequence's whole text again, since a recurrent state
cannot be truncated.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from draftwood.errors import CapabilityError
from draftwood.targets.base import ForwardOutput, Segment, Target, TargetInfo, chain_parents
from draftwood.targets.hf.probe import compute_plain_logits, find_mismatch
from draftwood.targets.hf.taps import LayerTaps
from draftwood.tree import is_chain

_STATE_NAMES = ("past_key_values", "cache_params", "state")


@dataclass(slots=True)
class _Sequence:
    capacity: int
    tokens: list[int] = field(default_factory=list)  # committed
    pending: list[int] = field(default_factory=list)  # of the last forward
    state: Any = None  # the model's cache of ``tokens`` and ``pending``; None: run the whole text again


class PlainTarget(Target):
    """Runs chains through a model's own cache. ``info.backend`` is "transformers-plain"."""

    def __init__(self, model: Any, info: TargetInfo, cache_tokens: int) -> None:
        self.info = info
        self._model = model
        self._taps = LayerTaps(model, info.num_layers, info.hidden_size)
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0
        self._num_slots = self._free = cache_tokens
        names = inspect.signature(model.forward).parameters
        self._state_name = next((name for name in _STATE_NAMES if name in names), None)
        if self._state_name is not None and not self._can_continue():
            self._state_name = None  # every forward then runs the whole text: slow, but exact

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def can_open(self, capacity: int) -> bool:
        return capacity <= self._free

    def open(self, capacity: int) -> int:
        if not self.can_open(capacity):
            raise CapabilityError(
                "The cache has no room for another sequence",
                got=f"{capacity} positions",
                allowed=f"at most {self._free} now",
                next_step="Shorten the prompt or max_tokens, or raise cache_tokens.",
            )
        self._free -= capacity
        sequence, self._next_id = self._next_id, self._next_id + 1
        self._sequences[sequence] = _Sequence(capacity)
        return sequence

    def close(self, sequence: int) -> None:
        self._free += self._sequences.pop(sequence).capacity

    def length(self, sequence: int) -> int:
        return len(self._sequences[sequence].tokens)

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        for segment in segments:
            self._check(segment)
        parts = [self._forward_one(self._sequences[segment.sequence], segment) for segment in segments]
        logits = torch.cat([logits for logits, _ in parts])
        taps = [taps for _, taps in parts if taps is not None]
        return ForwardOutput(logits, logits.argmax(dim=-1), torch.cat(taps) if taps else None)

    def keep(self, sequence: int, nodes: Sequence[int]) -> None:
        held = self._sequences[sequence]
        if len(nodes) < len(held.pending):
            held.state = None
        held.tokens.extend(held.pending[: len(nodes)])
        held.pending = []

    def truncate(self, sequence: int, length: int) -> None:
        held = self._sequences[sequence]
        if length < len(held.tokens) or held.pending:
            held.state = None
        held.tokens, held.pending = held.tokens[:length], []

    def resize(self, sequence: int, capacity: int) -> bool:
        held = self._sequences[sequence]
        if capacity - held.capacity > self._free:
            return False
        self._free -= capacity - held.capacity
        held.capacity = capacity
        return True

    def fork(self, sequence: int, capacity: int, length: int | None = None) -> int:
        copy = self.open(capacity)
        self._sequences[copy].tokens = self._sequences[sequence].tokens[:length]
        return copy

    def set_taps(self, layers: Sequence[int]) -> None:
        self._taps.set(layers)

    def _check(self, segment: Segment) -> None:
        held = self._sequences[segment.sequence]
        if segment.after or not is_chain(segment.parents):
            raise CapabilityError(
                f"{self.info.architecture} runs without draft trees: it takes chains of committed tokens only",
                got=f"a tree of {segment.after + len(segment.parents)} nodes",
                next_step="Use the drafter 'plain' with this model.",
            )
        if len(held.tokens) + len(segment.token_ids) > held.capacity:
            raise CapabilityError(
                "The sequence outgrows its part of the cache",
                got=f"{len(held.tokens)} committed + {len(segment.token_ids)} nodes",
                allowed=f"{held.capacity} positions",
            )

    @torch.no_grad()
    def _forward_one(self, held: _Sequence, segment: Segment) -> tuple[torch.Tensor, torch.Tensor | None]:
        new = list(segment.token_ids)
        if held.pending or len(new) > 1:
            held.state = None
        fed = new if held.state is not None else [*held.tokens, *new]
        keywords: dict[str, Any] = {"use_cache": False}
        if self._state_name is not None:
            keywords = {"use_cache": True}
            if held.state is not None:
                keywords[self._state_name] = held.state
        output = self._model(input_ids=torch.tensor([fed], device=self.info.device), return_dict=True, **keywords)
        held.state = getattr(output, self._state_name, None) if self._state_name is not None else None
        held.pending = new
        taps = self._taps.take(len(fed))
        logits = output.logits[0, len(fed) - segment.num_logits :].float()
        return logits, None if taps is None else taps[len(fed) - len(new) :]

    def _can_continue(self) -> bool:
        """Whether single steps through the model's own cache give the same logits as the whole text."""
        tokens = [(7 * i + 3) % self.info.vocab_size for i in range(6)]
        sequence = self.open(len(tokens))
        rows = []
        try:
            for start, stop in ((0, 3), (3, 4), (4, 5), (5, 6)):
                size = stop - start
                rows.append(self.forward([Segment(sequence, tokens[start:stop], chain_parents(size), size)]).logits)
                self.keep(sequence, range(size))
        except Exception:  # noqa: BLE001 - any failure of the model's code means that its cache cannot be used
            return False
        finally:
            self.close(sequence)
        pairs = list(zip(torch.cat(rows), compute_plain_logits(self._model, [tokens])[0], strict=True))
        return find_mismatch(pairs, self.info.dtype) is None
