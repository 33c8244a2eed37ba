"""The memory estimate of a plan against the memory of a real training step."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftwood.train.base import Batch
from draftwood.train.frozen.frozen_target import FrozenTarget
from draftwood.train.loop.plan import estimate_memory
from draftwood.train.methods import method_class
from tests.tools.train import KIND_OF, MODEL, new_head, random_examples, target_of
from tests.tools.trainer import configuration


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are created and still referenced."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._sizes:
                storage = tensor.untyped_storage()
                self._sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return made


@pytest.mark.parametrize(
    ("method", "options", "vocab_size", "changes", "sizes"),
    [
        pytest.param("eagle3", {"steps": 4}, 258, {}, [64] * 16, id="activations"),
        pytest.param("hass", {"steps": 3}, 258, {}, [512] * 2, id="scores"),
        pytest.param("eagle3", {"steps": 3}, 4096, {}, [64] * 8, id="logits of the head"),
        pytest.param("eagle3", {"steps": 1}, 4096, {"draft_vocab_size": 256}, [64] * 8, id="logits of the target"),
        pytest.param("medusa", {}, 4096, {}, [64] * 8, id="heads of their own"),
    ],
)
def test_planned_memory_matches_a_step(
    method: str, options: dict[str, int], vocab_size: int, changes: dict[str, int], sizes: list[int], tmp_path: Path
) -> None:
    model = replace(MODEL, vocab_size=vocab_size)
    head = new_head(KIND_OF[method], model=model, **changes)
    cls = method_class(method)
    made = cls.Options(**options)
    trained = cls(made, head, FrozenTarget.of(target_of(model), head))
    batch = Batch.of(random_examples(sizes, prompt=1, model=model))
    signals = trained.frozen.signals(batch)
    with HeldBytes() as held:
        trained.losses(batch, signals).total.backward()
    config = configuration(tmp_path, f"run.max_tokens={sum(sizes)}", method=method)
    guesses, scores = (
        cls.outputs_per_position(made, head.config),
        cls.scores_per_position(made, head.config, max(sizes)),
    )
    device = torch.device("cpu")
    memory = estimate_memory(config, head.config, model, torch.float32, device, guesses, scores)
    plan_training = memory["activations"] + memory["work"] + memory["gradients"]
    assert 0.8 < plan_training / held.peak < 1.3
