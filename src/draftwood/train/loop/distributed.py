"""Several processes that train one head: who this one is, how gradients meet, and tensors that lie in parts.

    torchrun --nproc-per-node 2 -m draftwood.train --method eagle3 --config my.toml

Every process runs the target itself and takes its share of the micro-batches. With ``ddp`` each has the whole head;
with ``fsdp`` weights, gradients and the optimiser's state lie in parts. One process is the same with nobody to talk to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from draftwood.errors import CapabilityError

WAIT = timedelta(hours=2)  # one process validates while the others wait


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # on this machine

    @property
    def is_first(self) -> bool:
        """Whether it is the one that writes and speaks."""
        return self.rank == 0

    def device(self, asked: str) -> str:
        """Each process has a GPU of its own where there are GPUs."""
        wants_gpu = asked == "cuda" or (asked == "auto" and torch.cuda.is_available())
        return f"cuda:{self.local_rank}" if self.world_size > 1 and wants_gpu else asked

    def summed(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, the same in each."""
        if self.world_size > 1:
            dist.all_reduce(numbers)
        return numbers

    def wait(self) -> None:
        if self.world_size > 1:
            dist.barrier()


@contextmanager
def joined_processes() -> Iterator[Processes]:
    """The processes that torchrun started, for as long as the block lasts; only this one where there is no torchrun."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Processes()
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() > local_rank
    if torch.cuda.is_available() and not on_gpus:
        raise CapabilityError(
            "There are more processes than GPUs",
            got=f"process {local_rank} of this machine, {torch.cuda.device_count()} GPUs",
            next_step="Lower --nproc-per-node.",
        )
    if on_gpus:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=WAIT)
    try:
        yield Processes(rank=dist.get_rank(), world_size=world_size, local_rank=local_rank)
    finally:
        dist.destroy_process_group()


def shared_module(module: nn.Module, strategy: str, processes: Processes) -> nn.Module:
    """The module whose gradients are the mean over all processes after its last backward of a step."""
    if processes.world_size == 1:
        return module
    if strategy == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh

        device = next(module.parameters()).device.type
        # One group of parameters: the whole of a step runs inside this module's forward, and a head is small.
        fully_shard(module, mesh=init_device_mesh(device, (processes.world_size,)))
        return module
    return DistributedDataParallel(module)


@contextmanager
def gradients_meet(module: nn.Module, meet: bool) -> Iterator[None]:
    """Whether gradients of a backward inside the block go to the others: only those of a step's last micro-batch do."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(meet)
        yield
    elif isinstance(module, DistributedDataParallel) and not meet:
        with module.no_sync():
            yield
    else:
        yield


def gather_objects(own: Any, processes: Processes) -> list[Any]:
    """What every process has, in the order of their ranks."""
    if processes.world_size == 1:
        return [own]
    found: list[Any] = [None] * processes.world_size
    dist.all_gather_object(found, own)
    return found


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may lie in parts, in one piece. All processes must ask at once."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> None:
    """Writes whole ``values`` into a tensor that may lie in parts."""
    if isinstance(tensor, DTensor):
        values = distribute_tensor(values.to(tensor.device), tensor.device_mesh, tensor.placements)
    tensor.copy_(values)
