"""A folder of weights: what its index names stays in it, and whether it is whole is known from its files."""

import json
import random
import shutil
import struct

import pytest
import torch
from transformers import AutoModelForCausalLM

from gva import GvaForCausalLM
from gva.run.files import FolderError
from gva.weights import INDEX, SUMS, is_whole, verify_folder
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


def flip(path, place=-5, bit=1):
    content = bytearray(path.read_bytes())
    content[place] ^= bit
    path.write_bytes(content)


@pytest.fixture
def saved(sharded, tmp_path):
    return shutil.copytree(sharded, tmp_path / "model")


def test_a_flipped_bit_is_noticed_wherever_it_is(saved):
    """In a header, it may be a tensor's name, which transformers would draw anew with a warning."""
    GvaForCausalLM.from_pretrained(saved)
    rng = random.Random(0)
    for _ in range(12):
        file = rng.choice(sorted(saved.glob("*.safetensors")))
        place, bit = rng.randrange(8, file.stat().st_size), 1 << rng.randrange(8)
        flip(file, place, bit)
        with pytest.raises(OSError, match=f"{file.name} is not what was written; copy .* again|{file}: "):
            GvaForCausalLM.from_pretrained(saved)
        flip(file, place, bit)
    file = max(saved.glob("*.safetensors"))
    flip(file, file.read_bytes().index(b"norm.weight"))
    with pytest.raises(OSError, match=f"{file.name} is not what was written; copy .* or remove model.sums.json"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_what_others_wrote_has_no_sums_and_loads(saved):
    (saved / SUMS).unlink()
    flip(max(saved.glob("*.safetensors")))
    GvaForCausalLM.from_pretrained(saved)


def test_saved_again_it_has_the_sums_of_the_new_weights(saved):
    before = (saved / SUMS).read_text()
    tiny_model("gva-drope-16", torch.float64).save_pretrained(saved)
    assert json.loads((saved / SUMS).read_text())["files"].keys() == {"model.safetensors"}
    assert (saved / SUMS).read_text() != before
    GvaForCausalLM.from_pretrained(saved)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"files": {}}', '{"files": {"../x": "0"}}'])
def test_sums_that_are_none_are_told(saved, content):
    (saved / SUMS).write_text(content)
    with pytest.raises(FolderError, match=r"model.sums.json: .*; copy the checkpoint again, or remove this file"):
        GvaForCausalLM.from_pretrained(saved)


def test_a_name_among_them_does_not_lead_outside(saved):
    files = json.loads((saved / SUMS).read_text())["files"]
    (saved / SUMS).write_text(json.dumps({"files": {**files, "../x": "0:00000000"}}))
    with pytest.raises(OSError, match=r"'../x' is not the name of a file"):
        GvaForCausalLM.from_pretrained(saved)


def test_more_layers_than_tensors_are_not_made(saved):
    """Which would take as long as a stranger likes."""
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4000}))
    with pytest.raises(OSError, match=r"4,000 layers in config.json, \d+ tensors; copy the checkpoint again"):
        AutoModelForCausalLM.from_pretrained(saved)
