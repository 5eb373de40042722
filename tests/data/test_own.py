"""Own text, as plain as it comes: cut into documents, a part held out, and what `--data` of a command means."""

import json
from itertools import pairwise

import pytest

from gva.cli import main
from gva.data import documents, own
from gva.data.documents import DataError, files_in, read_documents
from gva.data.holdout import HoldOut, choose, is_held_out
from gva.data.own import settle_data
from gva.data.prepare import prepare_files
from gva.data.shards import TokenDataset
from gva.data.tokenizer import load_tokenizer

PARAGRAPHS = [f"Chapter {i}. " + "It was a long and quiet evening by the sea. " * (i % 4 + 1) for i in range(400)]
NOVEL = "\n\n".join(PARAGRAPHS)
MODEL = [
    "hidden_size=16", "intermediate_size=16", "num_hidden_layers=1", "num_attention_heads=2", "num_value_groups=1",
    "value_head_dim=8", "length=16", "global_batch=2", "micro_batch=2", "max_position_embeddings=32",
]  # fmt: skip


def texts_of(folder, split):
    dataset, tokenizer = TokenDataset(folder, split), load_tokenizer(folder / "tokenizer").tokenizer
    starts = [0, *dataset.document_ends]
    return [tokenizer.decode(dataset.read(a, b - 1).tolist()) for a, b in pairwise(starts)]


def test_a_text_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path):
    (tmp_path / "novel.txt").write_text(NOVEL)
    cut = list(read_documents(tmp_path / "novel.txt"))
    assert "".join(cut) == NOVEL
    assert all(len(text) <= documents.LONGEST for text in cut)
    assert all(text.endswith("\n\n") for text in cut[:-1])
    assert 2 < len(cut) < 10, "paragraphs are gathered"


def test_a_text_without_blank_lines_is_cut_at_lines(tmp_path):
    text = "\n".join(PARAGRAPHS) + "\n" + "x" * 2 * documents.LONGEST + "\nend"
    (tmp_path / "novel.txt").write_text(text)
    cut = list(read_documents(tmp_path / "novel.txt"))
    assert "".join(cut) == text
    assert all(document.endswith("\n") for document in cut[:-1])
    assert sum(len(document) > documents.LONGEST for document in cut) == 1, "a line stays whole"


@pytest.mark.parametrize("separator", ["<|end|>", "\n\n", "\n--\n"])
def test_a_text_is_cut_where_its_separator_stands(separator, tmp_path):
    (tmp_path / "a.txt").write_text(separator.join([*PARAGRAPHS[:9], "", " \n"]) + separator)
    assert list(read_documents(tmp_path / "a.txt", separator=separator)) == PARAGRAPHS[:9]
    assert len(list(read_documents(tmp_path / "a.txt", separator=""))) == 1


def test_python_and_short_texts_are_a_document_each(tmp_path):
    for name, text in (("a.py", "import os\n\n\n" * 4000), ("b.txt", "One.\n\nTwo.\n")):
        (tmp_path / name).write_text(text)
        assert list(read_documents(tmp_path / name)) == [text]


def test_bytes_that_are_no_text_are_told_with_their_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\nna\xefve\n")
    with pytest.raises(DataError, match=r"a.txt: not UTF-8 text \(byte 7\) in line 2; write the file in UTF-8"):
        list(read_documents(tmp_path / "a.txt"))


@pytest.mark.parametrize("count", [2, 3, 10, 60, 700])
def test_something_is_held_out_by_its_content(count):
    texts = [*PARAGRAPHS, *(text + "!" for text in PARAGRAPHS)][:count]
    rule = choose(iter(texts))
    sides = {text: [split for split, _ in rule.sides(text)] for text in texts}
    share = sum(len(t) for t in texts if sides[t] == ["valid"]) / sum(map(len, texts))
    assert all(len(found) == 1 for found in sides.values())
    assert 0 < share < (0.9 if count < 10 else 0.2)
    assert choose(reversed(texts * 2)) == rule, "whatever the order, and copies with what they are copies of"
    if any(is_held_out(text, 100) for text in texts):
        assert rule == HoldOut()


@pytest.mark.parametrize("text", ["One.\n\nTwo two two two two.\n\nThree.", "a b c d e f g h i j k l", "xyz" * 9])
def test_of_a_single_document_the_end_is_held_out(text):
    rule = choose([text, text])
    assert rule == HoldOut(tails=True)
    (train, kept), (valid, held) = rule.sides(text)
    assert (train, valid, kept + held) == ("train", "valid", text)
    assert 0 < len(held) < len(text) / 2


def test_a_novel_and_ten_files_are_prepared(tmp_path, capsys):
    (tmp_path / "novel.txt").write_text(NOVEL)
    (tmp_path / "ten").mkdir()
    for i in range(10):
        (tmp_path / "ten" / f"{i}.txt").write_text(PARAGRAPHS[i] * 3)
    for name, pieces in (("novel.txt", {NOVEL}), ("ten", {PARAGRAPHS[i] * 3 for i in range(10)})):
        out = tmp_path / f"{name}-data"
        words = [str(tmp_path / name), "--out", str(out), "--vocab-size", "300", "--workers", "1"]
        assert main(["data", "prepare", *words]) == 0
        train, valid = (texts_of(out, split) for split in ("train", "valid"))
        assert sorted(map(len, [*train, *valid])) == sorted(
            len(part)
            for whole in pieces
            for part in ([whole] if name == "ten" else documents._passages(whole.splitlines(True)))
        )
        assert valid
        assert not set(train) & set(valid)
    assert main(["data", "prepare", str(tmp_path / "novel.txt"), "--out", str(tmp_path / "cut"), "--vocab-size", "300",
                 "--separator", r"\n\n", "--workers", "1"]) == 0  # fmt: skip
    assert len(texts_of(tmp_path / "cut", "train")) + len(texts_of(tmp_path / "cut", "valid")) == len(PARAGRAPHS)
    (tmp_path / "empty").mkdir()
    assert main(["data", "prepare", str(tmp_path / "empty"), "--out", str(tmp_path / "x")]) == 2
    assert "empty: a folder without texts (.jsonl, .txt, .parquet, .py)" in capsys.readouterr().err


def test_files_of_a_folder(tmp_path):
    names = ["b.txt", "a/c.jsonl.gz", "a/.hidden/d.txt", ".e.txt", "f.md", "run/log.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    found = files_in(tmp_path, but=tmp_path / "run")
    assert [str(path.relative_to(tmp_path)) for path in found] == ["a/c.jsonl.gz", "b.txt"]


@pytest.fixture
def never_the_standard_library(monkeypatch):
    monkeypatch.setattr(own, "prepare_standard_library", lambda *_, **__: pytest.fail("trained on something else"))


def test_what_data_means(tmp_path, never_the_standard_library):
    (tmp_path / "novel.txt").write_text(NOVEL)
    out, run = tmp_path / "prepared", tmp_path / "run"
    prepare_files([tmp_path / "novel.txt"], out, vocab_size=300, progress=False)
    assert settle_data(out, run, progress=False) == out
    assert settle_data(tmp_path / "novel.txt", run, progress=False) == run / "data"
    assert TokenDataset(run / "data").index["provenance"]["inputs"] == ["novel.txt"]
    assert settle_data(None, run, progress=False) == run / "data", "what is there is gone on with"
    assert settle_data(tmp_path / "novel.txt", run, progress=False) == run / "data"
    (tmp_path / "novel.txt").write_text(NOVEL + "\n\nThe end.")
    with pytest.raises(DataError, match=r"data: is prepared from something else, .*'novel.txt \w+' -> 'novel.txt"):
        settle_data(tmp_path / "novel.txt", run, progress=False)
    (tmp_path / "other").mkdir()
    for wrong, told in (
        ("novle.txt", r"novle.txt: no such file or folder; give texts, or a folder made by gva data prepare"),
        ("other", r"other: is not prepared \(no index.json\), and holds no text \(.jsonl, .txt, .parquet, .py\)"),
        ("run", r"run: is a run or a comparison; what it was trained on is .*run/data"),
    ):
        with pytest.raises(DataError, match=f"--data .*{told}"):
            settle_data(tmp_path / wrong, tmp_path / "new", progress=False)
    (out / "index.json").unlink()
    assert settle_data(out, run, progress=False) == out
    with pytest.raises(DataError, match="its preparation has not ended"):
        TokenDataset(out)


def test_commands_train_on_own_text(tmp_path, capsys, never_the_standard_library):
    texts, out = tmp_path / "texts", tmp_path / "out"
    texts.mkdir()
    (texts / "novel.txt").write_text(NOVEL)
    (texts / "more.jsonl").write_text(json.dumps({"text": "More of the same. " * 50}) + "\n")
    where = ["--out", str(out), "--device", "cpu", "--steps", "1", *MODEL]
    for command in (["train", "--variant", "gqa"], ["compare", "--variants", "gqa"]):
        assert main([*command, "--preset", "demo", "--data", str(tmp_path / "txets"), *where]) == 2
        assert "txets: no such file or folder" in capsys.readouterr().err
    assert not (out / "data").exists()
    assert main(["train", "--variant", "gqa", "--preset", "demo", "--data", str(texts), *where]) == 0
    assert TokenDataset(out / "data").index["provenance"]["inputs"] == ["more.jsonl", "novel.txt"]
