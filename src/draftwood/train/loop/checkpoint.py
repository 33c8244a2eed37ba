"""Checkpoints: everything a run needs to continue exactly where it stopped.

    RUN/checkpoints/step-00000500/head/       the current head, in the draftwood layout
    RUN/checkpoints/step-00000500/state.pt    optimiser, moving average, position in the data, random states
    RUN/best/                                 the head that validated best

A checkpoint is written under a temporary name and renamed when it is complete; older ones are removed only after that.
"""

from __future__ import annotations

import random
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from draftwood.errors import DraftwoodError, ModelError
from draftwood.heads import HeadModule, build_head, load_head, save_head
from draftwood.train.frozen import free_bytes
from draftwood.train.loop.distributed import copy_into, gather_tensor

VERSION = 1
_STEP = "step-"


class Place(NamedTuple):
    """Position in the data: the next micro-batch of each process."""

    epoch: int = 0
    batch: int = 0


@dataclass(slots=True)
class Progress:
    """Progress of a run."""

    step: int = 0  # completed steps
    place: Place = field(default_factory=Place)
    best: float | None = None  # best score so far, higher is better
    seconds: float = 0.0  # total time of the steps
    validated: int = 0  # step of the last validation


class Checkpoints:
    """Checkpoints of one run. The first process writes what all processes gather (`Snapshot.of`)."""

    def __init__(self, run: Path, keep: int) -> None:
        self.folder = run / "checkpoints"
        self.best = run / "best"
        self._keep = keep

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in ascending order."""
        if not self.folder.is_dir():
            return []
        names = [path.name.removeprefix(_STEP) for path in self.folder.glob(f"{_STEP}*") if path.is_dir()]
        return sorted(int(name) for name in names if name.isdigit())

    def path(self, step: int) -> Path:
        return self.folder / f"{_STEP}{step:08d}"

    def save(self, step: int, snapshot: Snapshot) -> Path:
        final = self.path(step)
        temporary = self.folder / f".{final.name}.partial-{uuid.uuid4().hex[:12]}"
        try:
            temporary.mkdir(parents=True)
            save_head(snapshot.head, temporary / "head")
            _save(snapshot.state, temporary / "state.pt")
            shutil.rmtree(final, ignore_errors=True)  # an earlier one of the same step
            temporary.rename(final)
        except (OSError, SafetensorError, DraftwoodError) as error:
            raise self._make_write_error(final, error) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return final

    def save_best(self, head: HeadModule) -> None:
        try:
            save_head(head, self.best, force=True)
        except (OSError, SafetensorError, DraftwoodError) as error:
            raise self._make_write_error(self.best, error) from error

    def load(self, step: int) -> Snapshot:
        path = self.path(step)
        with self.explain_damage(step):
            state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
            version = state["version"]
        if version != VERSION:
            raise ModelError("The checkpoint was written by another version of draftwood", got=version, allowed=VERSION)
        return Snapshot(load_head(path / "head").head, state)

    @contextmanager
    def explain_damage(self, step: int) -> Iterator[None]:
        """Damaged data can raise anything while it is unpickled and restored."""
        try:
            yield
        except (DraftwoodError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:
            raise ModelError(
                f"The checkpoint {self.path(step)} is damaged",
                got=f"state.pt: {type(error).__name__}: {error}".split("\n")[0][:200],
                next_step="Remove its folder and resume from the previous one.",
            ) from error

    def _make_write_error(self, final: Path, error: Exception) -> DraftwoodError:
        steps = self.steps()
        last = f"Free some space and {f'continue from step {steps[-1]}' if steps else 'start again'} with --resume."
        got = f"{getattr(error, 'got', None) or error}; {free_bytes(self.folder):,} bytes free there"
        return DraftwoodError(f"{final} cannot be written", got=got, next_step=last)


class Snapshot(NamedTuple):
    """State of a run: unsharded tensors on the CPU."""

    head: HeadModule
    state: dict[str, Any]

    @classmethod
    def of(
        cls,
        head: HeadModule,
        optimizer: torch.optim.Optimizer,
        mean: Sequence[Tensor] | None,
        progress: Progress,
        random_states: Sequence[Any],
    ) -> Snapshot:
        """Collective: tensors may be sharded, so all processes must call it."""
        moments = {
            name: {key: _copy_to_cpu(value) for key, value in optimizer.state[parameter].items()}
            for name, parameter in head.named_parameters()
            if parameter in optimizer.state
        }
        state = {
            "version": VERSION,
            "step": progress.step,
            "place": list(progress.place),
            "best": progress.best,
            "seconds": progress.seconds,
            "validated": progress.validated,
            "optimizer": moments,
            "mean": None if mean is None else [_copy_to_cpu(value) for value in mean],
            "random": list(random_states),
        }
        return cls(gather_head(head), state)

    def restore(self, head: HeadModule, optimizer: torch.optim.Optimizer, mean: Sequence[Tensor] | None) -> Progress:
        """Restore everything except the random states, which each process restores itself."""
        saved = dict(self.head.named_parameters())
        for name, parameter in head.named_parameters():
            copy_into(parameter, saved[name])
            moments = self.state["optimizer"].get(name)
            if moments is not None:
                optimizer.state[parameter] = {
                    key: value.clone() if value.ndim == 0 else _shard_like(parameter, value)
                    for key, value in moments.items()
                }
        for value, kept in zip(mean or (), self.state["mean"] or (), strict=True):
            copy_into(value, kept)
        state = self.state
        later = {
            name: state[name] for name in ("seconds", "validated") if name in state
        }  # missing in older checkpoints
        return Progress(state["step"], Place(*state["place"]), state["best"], **later)


def gather_head(head: HeadModule, parameters: Sequence[Tensor] | None = None) -> HeadModule:
    """Return an unsharded copy on the CPU. ``parameters`` replace those of the head, in order."""
    state = {name: _copy_to_cpu(tensor) for name, tensor in head.state_dict().items()}
    if parameters is not None:
        names = [name for name, _ in head.named_parameters()]
        state |= {name: _copy_to_cpu(tensor) for name, tensor in zip(names, parameters, strict=True)}
    copy = build_head(head.config, device="meta")
    copy.load_state_dict(state, assign=True)
    return copy.eval()


def get_random_state() -> dict[str, Any]:
    """Return the state of every global random generator as plain values."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))


def _save(state: Mapping[str, Any], path: Path) -> None:
    try:
        torch.save(state, path)
    except RuntimeError as error:  # how torch reports a full disk
        raise OSError(f"{path.name} could not be written completely") from error


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    """Return an unsharded copy on the CPU."""
    return gather_tensor(tensor.detach()).to("cpu", copy=True)


def _shard_like(parameter: Tensor, values: Tensor) -> Tensor:
    tensor = torch.zeros_like(parameter, requires_grad=False)
    copy_into(tensor, values)
    return tensor
