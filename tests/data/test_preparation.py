"""A prepared folder is what its index says: damage is told and mended, other inputs are refused, one process writes."""

import json
import shutil
from pathlib import Path

import pytest

from gva.cli import main
from gva.data import prepare
from gva.data.documents import DataError
from gva.data.prepare import prepare_files
from gva.data.recall import write_recall
from gva.data.shards import TokenDataset
from gva.data.tokenizer import train_bpe
from gva.run.folder import locked

TEXTS = [f"Document {i}: " + "what is written down is what is read. " * (i % 5 + 1) for i in range(250)]


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def inputs(tmp_path):
    return [write(tmp_path / f"{name}.jsonl", TEXTS[i * 60 : i * 60 + 90]) for i, name in enumerate("abc")]


@pytest.fixture
def folder(tmp_path, inputs):
    again(inputs, tmp_path / "out")
    return tmp_path / "out"


def again(inputs, out, **settings):
    return prepare_files(inputs, out, **{"vocab_size": 300, "hold_out": 10, "progress": False, **settings})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FILES = [
    "index.json", "preparation.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json",
    "train-00001.tokens", "train-00001.documents", "train-00001.json", "valid-00000.tokens", "valid-00002.documents",
]  # fmt: skip


@pytest.mark.parametrize("damage", ["removed", "truncated", "emptied", "flipped"])
@pytest.mark.parametrize("name", FILES)
def test_damage_of_any_file_is_told_and_mended(name, damage, folder, inputs, capsys):
    before, path = contents(folder), folder / name
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    path.write_bytes({"truncated": content[:-2], "flipped": flipped}.get(damage, b""))
    if damage == "removed":
        path.unlink()
    assert main(["data", "verify", str(folder)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert name.split("/")[-1].split(".")[0] in told
    again(inputs, folder)
    assert contents(folder) == before
    assert main(["data", "verify", str(folder)]) == 0


def test_another_tokenizer_is_told_and_mended(folder, inputs, capsys):
    before = contents(folder)
    train_bpe(["quite other text " * 50], 300).save(folder / "tokenizer", requested_vocab_size=300)
    assert main(["data", "verify", str(folder)]) == 2
    assert "tokenizer.json: differs from what was written; prepare it again" in capsys.readouterr().err
    again(inputs, folder)
    assert contents(folder) == before


def test_a_tokenizer_in_a_folder_of_an_earlier_version_is_compared_too(folder, capsys):
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({k: v for k, v in index.items() if k not in ("files", "sha256")}))
    assert main(["data", "verify", str(folder)]) == 0
    train_bpe(["quite other text " * 50], 300).save(folder / "tokenizer")
    assert main(["data", "verify", str(folder)]) == 2
    assert "is not the tokenizer of these shards" in capsys.readouterr().err


def test_what_is_whole_is_not_written_again(folder, inputs):
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    again(inputs, folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == times
    (folder / "train-00001.tokens").unlink()
    again(inputs, folder)
    changed = {path.name for path in times if path.stat().st_mtime_ns != times[path]}
    assert changed == {
        "index.json",
        *(f"{s}-00001.{k}" for s in ("train", "valid") for k in ("tokens", "documents", "json")),
    }


@pytest.mark.parametrize("state", ["finished", "stopped", "its record lost"])
def test_other_inputs_or_settings_are_refused_with_what_differs(state, folder, inputs, tmp_path):
    """What was begun is gone on with, or nothing is touched."""
    train_bpe(TEXTS, 290).save(tmp_path / "other")
    settings = (
        []
        if state == "its record lost"
        else [
            ("vocab_size: 300 -> 350", {"vocab_size": 350}),
            ("end: None -> 'a'", {"end": "a"}),
            ("hold_out: 10 -> 9", {"hold_out": 9}),
            ("separator: None -> '--'", {"separator": "--"}),
            (r"tokenizer: None -> '\w{16}'; vocab_size: 300 -> None", {"tokenizer": tmp_path / "other"}),
            (r"inputs.valid-00000: None -> 'c.jsonl \w{16}'", {"valid": inputs[2:]}),
        ]
    )
    if state == "stopped":
        for name in ("index.json", "train-00001.json", "train-00002.json"):
            (folder / name).unlink()
    if state == "its record lost":
        (folder / "preparation.json").write_text("{")
    before = contents(folder)
    for told, changed in settings:
        with pytest.raises(DataError, match=f"is prepared from something else, which differs in {told}"):
            again(inputs, folder, **changed)
    with pytest.raises(DataError, match=r"differs in inputs.train-00000: 'a.jsonl \w+' -> 'b.jsonl \w+'; "):
        again(inputs[1:], folder)
    original = inputs[1].read_bytes()
    write(inputs[1], TEXTS[:20])
    with pytest.raises(DataError, match=r"inputs.train-00001: .*; give another folder, or remove this one"):
        again(inputs, folder)
    inputs[1].write_bytes(original)
    assert contents(folder) == before
    again(inputs, folder)
    assert main(["data", "verify", str(folder)]) == 0


def test_another_kind_of_data_is_not_prepared_over(tmp_path, inputs):
    write_recall(tmp_path / "recall", keys=64, values=40, pairs=8)
    before = contents(tmp_path / "recall")
    with pytest.raises(DataError, match="differs in format: 'recall' -> None"):
        again(inputs, tmp_path / "recall")
    assert before.items() <= contents(tmp_path / "recall").items()


def test_a_folder_of_an_earlier_version_is_gone_on_with(tmp_path):
    kept = Path(__file__).parents[1] / "kept" / "data"
    folder = shutil.copytree(kept, tmp_path / "data")
    lines = {
        name: [f"{a} times {b} is {a * b}.\n" for a in range(2, 14) for b in range(2 + start, 14, 2)]
        for name, start in (("train", 0), ("valid", 1))
    }
    train, valid = (write(tmp_path / f"{name}.jsonl", texts) for name, texts in lines.items())
    settings = {"tokenizer": kept / "tokenizer", "valid": [valid], "vocab_size": 300}
    with pytest.raises(DataError, match=r"differs in inputs.train-00000: 'train.jsonl"):
        again([write(tmp_path / "other.jsonl", TEXTS)], folder, **settings)
    again([train], folder, **settings)
    for path in kept.glob("*-*"):
        assert (folder / path.name).stat().st_mtime_ns == path.stat().st_mtime_ns, "the shards that there were are kept"
    assert main(["data", "verify", str(folder)]) == 0


def test_one_preparation_at_a_time(folder, inputs):
    with (
        locked(folder, "preparing data"),
        pytest.raises(BlockingIOError, match="another process is preparing data here"),
    ):
        again(inputs, folder)


def test_what_killed_writers_have_left_goes(folder, inputs):
    before = contents(folder)
    for name in (".train-00001.tokens.77.tmp", ".index.json.77.tmp", "tokenizer/.tokenizer.json.77.tmp"):
        (folder / name).write_bytes(b"half")
    again(inputs, folder)
    assert contents(folder) == before


@pytest.mark.parametrize("reading", [2, 3], ids=["of a tokenizer", "of shards"])
def test_an_input_that_changes_while_it_is_read_leaves_no_record(reading, tmp_path, inputs, monkeypatch):
    """Neither a shard nor a tokenizer ever stands for bytes that were not read."""
    read, readings, original = prepare.read_documents, [], inputs[0].read_bytes()

    def changing(path, *how):
        readings.append(path)
        if readings.count(inputs[0]) == reading:
            write(inputs[0], [text.upper() for text in TEXTS])
        return read(path, *how)

    monkeypatch.setattr(prepare, "read_documents", changing)
    with pytest.raises(DataError, match=r"a.jsonl: was changed while it was read; run the command again"):
        again(inputs, tmp_path / "out")
    with pytest.raises(DataError, match="prepared from something else"):
        again(inputs, tmp_path / "out")
    inputs[0].write_bytes(original)
    for folder in ("out", "whole"):
        again(inputs, tmp_path / folder)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"text": "x"}\n{"text": "a \\ud800 b"}\n', r"a.jsonl: line 2: has half of a character, '\\ud800' at 2"),
        ('{"text": "x"}\n\n{"text": \n', r"a.jsonl: line 3 is not JSON \(.*\); mend or remove that line"),
        ("[" * 100_000 + "\n", r"a.jsonl: line 1 is not JSON \(.*\); mend or remove that line"),
        ("", r"a.jsonl: no text in it; give an input that has some"),
        ('{"text": ""}\n{"text": ""}\n', r"a.jsonl: no text in it; give an input that has some"),
        ('{"body": "x"}\n', "line 1 has no text in field 'text' .*; say with --field where it is"),
    ],
)
def test_what_is_wrong_with_an_input_is_told_with_its_place(content, told, tmp_path):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=told):
        again([tmp_path / "a.jsonl"], tmp_path / "out")
    assert not (tmp_path / "out" / "index.json").exists()


def test_an_unfinished_folder_says_how_to_go_on(folder):
    (folder / "index.json").unlink()
    with pytest.raises(DataError, match=r"its preparation has not ended .*; run the command again that began it"):
        TokenDataset(folder)
