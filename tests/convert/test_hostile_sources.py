"""A checkpoint from elsewhere, taken in: none of its Python runs, whoever says yes; no secret goes along."""

import json
import shutil

import pytest
import torch

from gva.cli import main
from gva.convert.importer import import_checkpoint
from gva.run.files import FolderError
from gva.weights import INDEX
from hostile import CODE, change, yes  # noqa: F401
from sources import random_model, saved, write_gguf

pytestmark = pytest.mark.hf


@pytest.fixture
def source(tmp_path):
    saved(tmp_path / "source")
    return tmp_path / "source"


def with_code(folder, made):
    (folder / "code.py").write_text(CODE.format(made=str(made)))
    change(folder / "config.json", auto_map={"AutoConfig": "code.Theirs"})
    change(
        folder / "tokenizer_config.json",
        tokenizer_class="Tokenizer",
        auto_map={"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]},
    )


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_layers_that_its_weights_do_not_have_are_not_made(family, source, tmp_path, capsys):
    change(source / "config.json", model_type=family, num_hidden_layers=10**9)
    assert main(["import", str(source), "--out", str(tmp_path / "out")]) == 2
    assert "source: 1,000,000,000 layers in config.json, " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_config_that_contradicts_itself_is_told_in_one_line(source, tmp_path, capsys):
    change(source / "config.json", model_type="qwen2", layer_types=["full_attention"] * 7)
    assert main(["import", str(source), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "source: cannot be loaded (StrictDataclass" in told
    assert told.count("\n") == 1


def test_python_of_a_folder_is_not_run(source, tmp_path, capsys):
    with_code(source, tmp_path / "made")
    (source / "tokenizer.json").rename(
        source / "vocab.json"
    )  # a slow tokenizer, which transformers has to make a fast one of
    (source / "generation_config.json").unlink(missing_ok=True)
    assert main(["import", str(source), "--out", str(tmp_path / "out")]) == 2
    assert "contains custom code" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_nor_is_python_beside_a_gguf_file(tmp_path):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "model.gguf", random_model("llama 2"))
    (tmp_path / "config.json").write_text("{}")
    with_code(tmp_path, tmp_path / "made")
    main(["import", str(tmp_path / "model.gguf"), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["LICENSE", "tokenizer.json", "generation_config.json", "model.safetensors"])
def test_a_link_to_a_secret_is_not_copied(source, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    if (source / name).is_file():
        shutil.copy(source / name, secret)
        (source / name).unlink()
    (source / name).symlink_to(secret)
    with pytest.raises(
        FolderError, match=rf"{name}: a link to .*secret, outside of the folder; put a copy in its place"
    ):
        import_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_snapshot_of_the_hubs_cache_is_taken(source, tmp_path):
    """It is links into a folder beside it."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (source / "LICENSE").write_text("theirs")
    for number, file in enumerate(source.iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    import_checkpoint(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "theirs"


def test_an_index_that_leads_out_is_refused(tmp_path):
    source = tmp_path / "source"
    saved(source, max_shard_size="30KB")
    index = json.loads((source / INDEX).read_text())
    name = index["weight_map"]["model.norm.weight"]
    (source / name).rename(tmp_path / "x.safetensors")
    moved = {key: "../x.safetensors" if value == name else value for key, value in index["weight_map"].items()}
    change(source / INDEX, weight_map=moved)
    with pytest.raises(FolderError, match=r"'../x.safetensors' is not the name of a file"):
        import_checkpoint(source, tmp_path / "out")


@pytest.mark.parametrize("dtype", ["load", "__name__", "complex64"])
def test_a_dtype_that_is_none_is_told(source, tmp_path, dtype):
    change(source / "config.json", dtype=dtype)
    with pytest.raises(FolderError, match=rf"config.json: dtype={dtype!r}: must be one of"):
        import_checkpoint(source, tmp_path / "out")


@pytest.mark.parametrize("number", [float("nan"), 1e30])
def test_weights_that_are_not_numbers_are_not_taken_in(tmp_path, number):
    """Nor such as the precision asked for cannot hold."""
    model = saved(tmp_path / "source")
    model.model.norm.weight.data[3] = number
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(FolderError, match=r"model\.norm\.weight has weights that are not numbers in torch\.float16"):
        import_checkpoint(tmp_path / "source", tmp_path / "out", torch.float16)
    assert not (tmp_path / "out").exists()
