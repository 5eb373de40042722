"""The files of a checkpoint: data, never code, and nothing of them outside of their folder."""

import pickle
import random
from pathlib import PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from gva.run.checkpoints import CheckpointError, read_checkpoint
from gva.run.files import FolderError
from gva.run.storage import LIST, read_list
from gva.run.sums import checksum

STATE = {"model.a": torch.arange(6.0), "step": torch.tensor(3)}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "step-00000003"
    dcp.save({name: t.clone() for name, t in STATE.items()}, checkpoint_id=folder, no_dist=True)
    return folder


def rewrite(checkpoint, change):
    found = pickle.loads((checkpoint / LIST).read_bytes())
    change(found)
    (checkpoint / LIST).write_bytes(pickle.dumps(found))


def read(checkpoint):
    state = {name: torch.zeros_like(t) for name, t in STATE.items()}
    read_checkpoint(checkpoint, state, {}, "copy it again")
    return state


def test_what_the_library_writes_is_read(checkpoint):
    assert set(read_list(checkpoint).state_dict_metadata) == set(STATE)
    assert all(torch.equal(t, STATE[name]) for name, t in read(checkpoint).items())


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("where", ["instead of the list", "inside the list"])
def test_a_list_that_runs_code_does_not(checkpoint, where, tmp_path):
    made = tmp_path / "made"
    if where == "inside the list":
        rewrite(checkpoint, lambda found: setattr(found, "planner_data", Attack(made)))
        made.unlink(missing_ok=True)
    else:
        (checkpoint / LIST).write_bytes(pickle.dumps(Attack(made)))
    with pytest.raises(CheckpointError, match=r"asks for .*open, which no checkpoint needs; do not use this folder"):
        read(checkpoint)
    assert not made.exists()


def test_a_list_cannot_change_a_class_that_it_may_name(checkpoint):
    """Which would hold for all of the process: that every path lies inside of every folder, say."""
    path, name = b"cpathlib\nPosixPath\n", b"X\x0f\x00\x00\x00is_relative_to\x00"
    changed = b"\x80\x04" + path + b"N}" + name + path + b"s\x86b0"  # its attributes, by a pair of which one is None
    (checkpoint / LIST).write_bytes(changed + (checkpoint / LIST).read_bytes()[2:])
    with pytest.raises(CheckpointError, match="would change PosixPath for everybody; do not use this folder"):
        read(checkpoint)
    assert not hasattr(PosixPath, "is_relative_to\x00")


def test_an_object_in_the_place_of_a_tensor_is_refused(checkpoint):
    """The library unpickles such an object without a look at it."""
    rewrite(checkpoint, lambda found: found.state_dict_metadata.update({"step": BytesStorageMetadata()}))
    with pytest.raises(CheckpointError, match="BytesStorageMetadata, which no checkpoint needs"):
        read(checkpoint)


@pytest.mark.parametrize("name", ["../elsewhere.distcp", "/etc/passwd", "", 3])
def test_a_file_outside_is_not_opened(checkpoint, name):
    def away(found):
        for place in found.storage_data.values():
            place.relative_path = name

    rewrite(checkpoint, away)
    with pytest.raises(CheckpointError, match=r"is not the name of a file"):
        read(checkpoint)


def test_a_transformation_is_refused(checkpoint):
    def transformed(found):
        for place in found.storage_data.values():
            place.transform_descriptors = ["zstd"]

    rewrite(checkpoint, transformed)
    with pytest.raises(FolderError, match="asks for a transformation"):
        read_list(checkpoint)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", pickle.dumps([1]), pickle.dumps({})])
def test_what_is_no_list_is_told(checkpoint, content):
    (checkpoint / LIST).write_bytes(content)
    with pytest.raises(FolderError, match=r"\.metadata is (damaged|not the list of a checkpoint)"):
        read_list(checkpoint)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 2**22, 2**22 + 5])
def test_a_sum_changes_with_any_bit_and_any_length(tmp_path, size):
    rng, path = random.Random(size), tmp_path / "file"
    content = bytearray(rng.randbytes(size))
    path.write_bytes(content)
    before = checksum(path)
    assert checksum(path) == before == checksum(path, mapped=True)
    for _ in range(8 if size else 0):
        place, bit = rng.randrange(size), 1 << rng.randrange(8)
        content[place] ^= bit
        path.write_bytes(content)
        assert checksum(path) != before
        content[place] ^= bit
    for other in (
        content + b"\0",
        content[:-1],
        *([content[4096:8192] + content[:4096] + content[8192:]] * (size > 8192)),
    ):
        path.write_bytes(other)
        assert (checksum(path) != before) == (bytes(other) != bytes(content))
