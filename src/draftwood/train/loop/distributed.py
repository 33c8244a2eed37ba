"""Distributed training of one head: ranks, gradient synchronisation, sharded tensors.

    torchrun --nproc-per-node 2 -m draftwood.train --method eagle3 --config my.toml

Every process runs the target and its share of the micro-batches. With ``ddp`` each process has the whole head; with
``fsdp`` weights, gradients and optimiser state are sharded. A single process takes the same path without communication.
"""

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

TIMEOUT = timedelta(hours=2)  # the first process validates while the others wait


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # on this machine

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def device(self, asked: str) -> str:
        """Return the device of this process: with several processes each has its own GPU."""
        wants_gpu = asked == "cuda" or (asked == "auto" and torch.cuda.is_available())
        return f"cuda:{self.local_rank}" if self.world_size > 1 and wants_gpu else asked

    def all_reduce(self, numbers: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(numbers)
        return numbers

    def wait(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def started_processes() -> Processes:
    """This process among those that torchrun started; without torchrun there is one."""
    rank, world_size, local_rank = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    return Processes(rank=rank, world_size=world_size, local_rank=local_rank)


@contextmanager
def join_processes() -> Iterator[Processes]:
    """Join the process group of torchrun inside the block. Without torchrun there is one process."""
    started = started_processes()
    if started.world_size == 1:
        yield Processes()
        return
    local_rank = started.local_rank
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() > local_rank
    if torch.cuda.is_available() and not on_gpus:
        raise CapabilityError(
            "There are more processes than GPUs",
            got=f"process {local_rank} of this machine, {torch.cuda.device_count()} GPUs",
            next_step="Lower --nproc-per-node.",
        )
    if on_gpus:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=TIMEOUT)
    try:
        yield started
    finally:
        dist.destroy_process_group()


def share_module(module: nn.Module, strategy: str, processes: Processes) -> nn.Module:
    """Wrap the module so that gradients are averaged over processes after the last backward of a step."""
    if processes.world_size == 1:
        return module
    if strategy == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh

        device = next(module.parameters()).device.type
        # One parameter group is enough: a whole step runs inside this module's forward, and a head is small.
        fully_shard(module, mesh=init_device_mesh(device, (processes.world_size,)))
        return module
    return DistributedDataParallel(module)


@contextmanager
def sync_gradients(module: nn.Module, enabled: bool) -> Iterator[None]:
    """Synchronise gradients in the block only if ``enabled``: in the last micro-batch of a step."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
        yield
    elif isinstance(module, DistributedDataParallel) and not enabled:
        with module.no_sync():
            yield
    else:
        yield


def gather_objects(own: Any, processes: Processes) -> list[Any]:
    """Return the objects of all processes, ordered by rank."""
    if processes.world_size == 1:
        return [own]
    found: list[Any] = [None] * processes.world_size
    dist.all_gather_object(found, own)
    return found


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return a possibly sharded tensor as a whole. Collective: all processes must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_into(tensor: Tensor, values: Tensor) -> None:
    """Copy whole ``values`` into a possibly sharded tensor."""
    if isinstance(tensor, DTensor):
        values = distribute_tensor(values.to(tensor.device), tensor.device_mesh, tensor.placements)
    tensor.copy_(values)
