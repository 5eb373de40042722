"""The processes that share a run."""

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among all of them."""

    rank: int
    world: int
    device: torch.device
    side: dist.ProcessGroup  # a CPU group beside the step's own: barriers, counts, the wish to stop
    writer: dist.ProcessGroup  # a CPU group for the thread that writes checkpoints: its calls come at any time

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def hardware(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return name if self.world == 1 else f"{self.world} x {name}"


@contextmanager
def process_group(device: str | None = None) -> Iterator[Ranks]:
    """Join the group torchrun describes, or one of our own."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if "RANK" in os.environ:
        local = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
        if kind == "cuda":
            torch.cuda.set_device(local)
        dist.init_process_group(backend, timeout=datetime.timedelta(minutes=30))
    else:
        local = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), local, *(dist.new_group(backend="gloo") for _ in range(2)))
    finally:
        dist.destroy_process_group()
