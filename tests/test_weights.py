"""A folder of weights: what its index names stays in it, and whether it is whole is known from its files."""

import json
import shutil
import struct

import pytest
import torch

from gva.run.files import FolderError
from gva.weights import INDEX, is_whole, verify_folder
from models import tiny_model


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    tiny_model("gva-drope-16", torch.float32).save_pretrained(folder, max_shard_size="60KB")
    return folder


@pytest.mark.parametrize("name", ["../precious", "/tmp/precious", "a/../../precious", 7, None])
def test_an_index_that_names_a_file_outside_is_refused_and_nothing_is_removed(sharded, tmp_path, name):
    folder = shutil.copytree(sharded, tmp_path / "model")
    (tmp_path / "precious").write_text("precious")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))
    before = sorted(path.name for path in folder.iterdir())
    for use in (verify_folder, tiny_model("gqa", torch.float32).save_pretrained):
        with pytest.raises(
            FolderError, match=r"index.json: .* is not the name of a file in .*; do not use this folder"
        ):
            use(folder)
    assert (tmp_path / "precious").read_text() == "precious"
    assert sorted(path.name for path in folder.iterdir()) == before
    assert not is_whole(folder)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": 3}', "{"])
def test_an_index_that_is_none_is_told(sharded, tmp_path, content):
    folder = shutil.copytree(sharded, tmp_path / "model")
    (folder / INDEX).write_text(content)
    with pytest.raises(OSError, match="not a readable shard index"):
        verify_folder(folder)


def test_whole_is_with_config_and_every_shard_to_its_end(sharded, tmp_path):
    assert is_whole(sharded)
    assert not is_whole(tmp_path)
    assert not is_whole(tmp_path / "nowhere")
    for number, spoil in enumerate([
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: [path.unlink() for path in folder.glob("model*")],
        lambda folder: min(folder.glob("*.safetensors")).write_bytes(b""),
        lambda folder: max(folder.glob("*.safetensors")).unlink(),
        lambda folder: (folder / INDEX).unlink(),
        lambda folder: (folder / INDEX).write_text("[" * 10**5),
        lambda folder: min(folder.glob("*.safetensors")).write_bytes(struct.pack("<Q", 10**5) + b"[" * 10**5),
    ]):  # fmt: skip
        folder = shutil.copytree(sharded, tmp_path / str(number))
        spoil(folder)
        assert not is_whole(folder)
