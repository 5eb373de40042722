"""Checkpoints of a run, which training goes on from: written in the background, whole or not there, the last good one
surviving a kill at any moment. Each knows its run and its bytes. The weights of one can be read by themselves."""

import json
import os
import re
import sys
import warnings
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from gva.run.atomic import write_atomically
from gva.run.files import read_object, remove, subfolder
from gva.run.folder import CHECKPOINTS, contradictions
from gva.run.ranks import Ranks
from gva.run.storage import LIST, Reader, Writer
from gva.run.sums import checksum, comparing

UNFINISHED = ".unfinished"
_NAME = re.compile("step-[0-9]{8,}")
RECORD = "checkpoint.json"  # of which run and step a checkpoint is, and the sums of its files


class CheckpointError(OSError):
    """A checkpoint that could not be written or read, with what is left."""


class Checkpoints:
    """The folders `checkpoints/step-00000500`, ... of a run. One appears under that name once it is whole."""

    def __init__(self, out: Path, identity: dict[str, Any], ranks: Ranks, keep: int) -> None:
        self.folder, self.identity, self.ranks, self.keep = out / CHECKPOINTS, identity, ranks, keep
        self._pending: tuple[int, Writer, Future] | None = None
        if ranks.first:
            for left in subfolder(out, CHECKPOINTS).glob(f"*{UNFINISHED}"):
                remove(left)  # a link too, through which the next one would be written
            self._forget_old()  # as a kill may have prevented
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
        writer = Writer(self._unfinished(step))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            future = dcp.async_save(staged, storage_writer=writer, process_group=self.ranks.writer)
        self._pending = (step, writer, future if isinstance(future, Future) else future.upload_completion)

    def poll(self) -> None:
        """Publish a checkpoint that every rank has written meanwhile. All ranks call this at the same step."""
        if self._pending is None:
            return
        written = torch.tensor(float(self._pending[-1].done()))
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
            self._pending[-1].exception()

    def finish(self) -> None:
        """Wait for the checkpoint under way and publish it."""
        if self._pending is None:
            return
        step, writer, future = self._pending
        self._pending = None
        try:
            future.result()
        except (Exception, CheckpointException) as error:
            good = self.steps()
            left = f"the checkpoint of step {good[-1]} is whole" if good else "there is no earlier one"
            raise CheckpointError(f"{self.path(step)}: could not be written ({_reason(error)}); {left}") from error
        sums: list[dict[str, str]] = [{}] * self.ranks.world
        dist.all_gather_object(sums, writer.sums, self.ranks.side)
        if self.ranks.first:
            files = {name: told for of_rank in sums for name, told in of_rank.items()}
            record = {"run": self.identity, "step": step, "files": files}
            write_atomically(self._unfinished(step) / RECORD, json.dumps(record, indent=2))
            os.replace(self._unfinished(step), self.path(step))
            self._forget_old()
        dist.barrier(self.ranks.side)

    def load(self, step: int, state: dict[str, Tensor]) -> None:
        earlier = [other for other in self.steps() if other < step]
        before = f"go on from the one before, of step {earlier[-1]}" if earlier else "begin again"
        read_checkpoint(self.path(step), state, self.identity, f"remove it to {before}", self.ranks.side)

    def _forget_old(self) -> None:
        for old in self.steps()[: -self.keep]:
            with suppress(OSError):
                remove(self.path(old))

    def _unfinished(self, step: int) -> Path:
        return self.path(step).with_name(self.path(step).name + UNFINISHED)


def steps_in(folder: Path) -> list[int]:
    """The steps of the whole checkpoints in a folder, oldest first."""
    return sorted(step_of(path) for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir())


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def shapes_in(path: Path, advice: str) -> dict[str, tuple[int, ...]]:
    """Of the tensors that a checkpoint lists, by their names."""
    try:
        listed: dict[str, Any] = Reader(path).listed.state_dict_metadata
        return {name: tuple(held.size) for name, held in listed.items()}
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read ({_reason(error)}); {advice}") from error


def read_checkpoint(
    path: Path, state: dict[str, Tensor], identity: dict[str, Any], advice: str, group: dist.ProcessGroup | None = None
) -> None:
    """Read into these tensors, however they were sharded when written, if the checkpoint is of the run of this identity
    and undamaged; all ranks of a group together, or one process alone. `advice` is for whoever has one that is not."""
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def refuse(*found: str) -> None:
        """What any rank has found, on all of them, or the others would wait for it."""
        wrong = [found] * world
        if group is not None:
            dist.all_gather_object(wrong, found, group)
        if told := next(filter(None, (one for kind in zip(*wrong, strict=True) for one in kind)), ""):
            raise CheckpointError(f"{path}: cannot be read ({told}); {advice}")

    reader = Reader(path)
    told, files = _recorded(path, identity)
    refuse(told or _unlisted(reader, dict(files).get(LIST)))
    if not files and rank == 0:
        print(f"{path}: of an earlier version, without {RECORD}: read unchecked", file=sys.stderr, flush=True)
    failed = ""
    with comparing(path, files[rank::world], path / RECORD) as changed:  # ranks share the files
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.load(state, storage_reader=reader, process_group=group, no_dist=group is None)
        except (Exception, CheckpointException) as error:
            failed = _reason(error)
    refuse(changed.result(), failed)


def _recorded(path: Path, identity: dict[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """What a checkpoint says that speaks against it: another run, or nonsense. And the sums of its files, of which an
    earlier version had none."""
    if not (path / RECORD).is_file():
        return "", []
    try:
        record = read_object(path / RECORD, "its files cannot be trusted")
        changed = contradictions(record["run"], identity)
        changed |= contradictions({"step": record["step"]}, {"step": step_of(path)})
        files = sorted(record["files"].items())
        unknown = {LIST, *(file.name for file in path.glob("*.distcp"))} - dict(files).keys()
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        return _reason(error), []
    if unknown:
        return f"{RECORD} has no sum of {min(unknown)}", []
    told = "; ".join(f"{name}: {theirs!r} -> {ours!r}" for name, (theirs, ours) in changed.items())
    return f"of another run: {told}" if told else "", files


def _unlisted(reader: Reader, known: str | None) -> str:
    """What is wrong with the list of what a checkpoint holds, looked at before the library meets it."""
    try:
        if known is not None and checksum(Path(reader.path) / LIST) != known:
            return f"{LIST} is not what was written"
        return "" if reader.listed else LIST
    except (ValueError, OSError) as error:
        return _reason(error)


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
