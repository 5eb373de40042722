"""Checkpoints of a run, which training goes on from: written in the background, whole or not there, the last good one
surviving a kill at any moment. The weights of one can be read by themselves."""

import os
import shutil
import warnings
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from gva.run.ranks import Ranks

UNFINISHED = ".unfinished"


class CheckpointError(OSError):
    """A checkpoint that could not be written or read, with what is left."""


class Checkpoints:
    """The folder `step-00000500`, ... of a run. A folder appears under that name once it is whole."""

    def __init__(self, folder: Path, ranks: Ranks, keep: int) -> None:
        self.folder, self.ranks, self.keep = folder, ranks, keep
        self._pending: tuple[int, Future] | None = None
        if ranks.first:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"*{UNFINISHED}"):
                shutil.rmtree(left, ignore_errors=True)
        dist.barrier(ranks.side)

    def steps(self) -> list[int]:
        return steps_in(self.folder)

    def path(self, step: int) -> Path:
        return path_of(self.folder, step)

    def save(self, step: int, state: dict[str, Tensor]) -> None:
        """Copy the state aside and write it while training goes on; waits for the one before."""
        self.finish()
        # A copy of what lives on the host is ours to make: the writer would keep a view of it.
        staged = {name: t.detach().clone() if t.device.type == "cpu" else t for name, t in state.items()}
        target = self.path(step).with_name(self.path(step).name + UNFINISHED)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            future = dcp.async_save(staged, checkpoint_id=target, process_group=self.ranks.writer)
        self._pending = (step, future if isinstance(future, Future) else future.upload_completion)

    def poll(self) -> None:
        """Publish a checkpoint that every rank has written meanwhile. All ranks call this at the same step."""
        if self._pending is None:
            return
        written = torch.tensor(float(self._pending[1].done()))
        if self.ranks.world > 1:
            dist.all_reduce(written, op=dist.ReduceOp.MIN, group=self.ranks.side)
        if written:
            self.finish()

    def abandon(self) -> None:
        """After an error on this rank: let the writer end, and publish only if no other rank must agree."""
        if self._pending is None:
            return
        if self.ranks.world == 1:
            self.finish()
        else:
            self._pending[1].exception()

    def finish(self) -> None:
        """Wait for the checkpoint under way and publish it."""
        if self._pending is None:
            return
        step, future = self._pending
        self._pending = None
        try:
            future.result()
        except (Exception, CheckpointException) as error:
            good = self.steps()
            left = f"the checkpoint of step {good[-1]} is whole" if good else "there is no earlier one"
            raise CheckpointError(f"{self.path(step)}: could not be written ({_reason(error)}); {left}") from error
        dist.barrier(self.ranks.side)
        if self.ranks.first:
            os.replace(self.path(step).with_name(self.path(step).name + UNFINISHED), self.path(step))
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.path(old), ignore_errors=True)
        dist.barrier(self.ranks.side)

    def load(self, step: int, state: dict[str, Tensor]) -> None:
        read_checkpoint(self.path(step), state, "remove it to go on from the one before", self.ranks.side)


def steps_in(folder: Path) -> list[int]:
    """The steps of the whole checkpoints in a folder, oldest first."""
    return sorted(map(step_of, folder.glob("step-*[0-9]")))


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def read_checkpoint(path: Path, state: dict[str, Tensor], advice: str, group: dist.ProcessGroup | None = None) -> None:
    """Read into these tensors, however they were sharded when written; all ranks of a group together, or one process
    alone. `advice` is for whoever has one that cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=path, process_group=group, no_dist=group is None)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{path}: cannot be read ({_reason(error)}); {advice}") from error


def _reason(error: BaseException) -> str:
    """The cause, without the traceback that the library puts into its message."""
    return str(error).strip().splitlines()[-1]


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["random.cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["random.cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["random.cuda"], device)
