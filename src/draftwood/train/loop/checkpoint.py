"""Checkpoints: everything a run needs to go on as if it had never stopped.

    RUN/checkpoints/step-00000500/head/       the head as it stands, in the project's layout
    RUN/checkpoints/step-00000500/state.pt    optimiser, running mean, place in the data, random states
    RUN/best/                                 the head that validated best

A checkpoint is written under a temporary name and renamed when it is whole; older ones go only after that.
"""

from __future__ import annotations

import random
import shutil
import uuid
from collections.abc import Mapping, Sequence
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
from draftwood.train.loop.distributed import fill, whole

VERSION = 1
_STEP = "step-"


class Place(NamedTuple):
    """Where a run stands in its data: the next micro-batch of each process."""

    epoch: int = 0
    batch: int = 0


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    step: int = 0  # steps that are done
    place: Place = field(default_factory=Place)
    best: float | None = None  # the best score so far: higher is better
    seconds: float = 0.0  # that the steps took
    validated: int = 0  # steps that were done when the head was last validated


class Checkpoints:
    """Those of one run. One process writes; all of them gather what is written (`Snapshot.of`)."""

    def __init__(self, run: Path, keep: int) -> None:
        self.folder = run / "checkpoints"
        self.best = run / "best"
        self._keep = keep

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, in order."""
        if not self.folder.is_dir():
            return []
        names = [path.name.removeprefix(_STEP) for path in self.folder.glob(f"{_STEP}*") if path.is_dir()]
        return sorted(int(name) for name in names if name.isdigit())

    def path(self, step: int) -> Path:
        return self.folder / f"{_STEP}{step:08d}"

    def save(self, step: int, snapshot: Snapshot) -> Path:
        final = self.path(step)
        aside = self.folder / f".{final.name}.partial-{uuid.uuid4().hex[:12]}"
        try:
            aside.mkdir(parents=True)
            save_head(snapshot.head, aside / "head")
            _save(snapshot.state, aside / "state.pt")
            shutil.rmtree(final, ignore_errors=True)  # of the same step: it says the same
            aside.rename(final)
        except (OSError, SafetensorError, DraftwoodError) as error:
            raise self._unwritable(final, error) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return final

    def save_best(self, head: HeadModule) -> None:
        try:
            save_head(head, self.best, force=True)
        except (OSError, SafetensorError, DraftwoodError) as error:
            raise self._unwritable(self.best, error) from error

    def load(self, step: int) -> Snapshot:
        path = self.path(step)
        try:
            state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
            version = state["version"]
        except Exception as error:  # damaged bytes can lead an unpickler anywhere
            raise ModelError(
                f"The checkpoint {path} is damaged",
                got=f"state.pt: {error}".split("\n")[0][:200],
                next_step="Remove its folder and resume from the one before it.",
            ) from error
        if version != VERSION:
            raise ModelError("The checkpoint is of another version of draftwood", got=version, allowed=VERSION)
        return Snapshot(load_head(path / "head").head, state)

    def _unwritable(self, final: Path, error: Exception) -> DraftwoodError:
        steps = self.steps()
        last = f"Free some space and {f'go on from step {steps[-1]}' if steps else 'begin anew'} with --resume."
        got = f"{getattr(error, 'got', None) or error}; {free_bytes(self.folder):,} bytes are free there"
        return DraftwoodError(f"{final} cannot be written", got=got, next_step=last)


class Snapshot(NamedTuple):
    """A run at rest: whole tensors on the host."""

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
        """All processes gather at once, since tensors may lie in parts."""
        moments = {
            name: {key: _host(value) for key, value in optimizer.state[parameter].items()}
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
            "mean": None if mean is None else [_host(value) for value in mean],
            "random": list(random_states),
        }
        return cls(whole_head(head), state)

    def restore(self, head: HeadModule, optimizer: torch.optim.Optimizer, mean: Sequence[Tensor] | None) -> Progress:
        """Writes everything back but the random states, which each process takes for itself."""
        saved = dict(self.head.named_parameters())
        for name, parameter in head.named_parameters():
            fill(parameter, saved[name])
            moments = self.state["optimizer"].get(name)
            if moments is not None:
                optimizer.state[parameter] = {
                    key: value.clone() if value.ndim == 0 else _like(parameter, value) for key, value in moments.items()
                }
        for value, kept in zip(mean or (), self.state["mean"] or (), strict=True):
            fill(value, kept)
        state = self.state
        later = {name: state[name] for name in ("seconds", "validated") if name in state}  # older ones do not say
        return Progress(state["step"], Place(*state["place"]), state["best"], **later)


def whole_head(head: HeadModule, parameters: Sequence[Tensor] | None = None) -> HeadModule:
    """A copy on the host, whole where the head lies in parts; ``parameters`` take the place of its own, in order."""
    state = {name: _host(tensor) for name, tensor in head.state_dict().items()}
    if parameters is not None:
        names = [name for name, _ in head.named_parameters()]
        state |= {name: _host(tensor) for name, tensor in zip(names, parameters, strict=True)}
    copy = build_head(head.config, device="meta")
    copy.load_state_dict(state, assign=True)
    return copy.eval()


def random_state() -> dict[str, Any]:
    """Every source of randomness that this process shares with its libraries, as plain values."""
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
    except RuntimeError as error:  # torch reports a full disk so, by the line of its own code where it noticed
        raise OSError(f"{path.name} could not be written to its end") from error


def _host(tensor: Tensor) -> Tensor:
    """A copy that stays as it is when training goes on."""
    return whole(tensor.detach()).to("cpu", copy=True)


def _like(parameter: Tensor, values: Tensor) -> Tensor:
    tensor = torch.zeros_like(parameter, requires_grad=False)
    fill(tensor, values)
    return tensor
