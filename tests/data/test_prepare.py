"""Files to shards: every format, any interruption, the same bytes; broken input is named."""

import gzip
import io
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from gva.cli import main
from gva.data.documents import DataError, _open_zst, read_documents
from gva.data.holdout import is_held_out
from gva.data.prepare import prepare_dataset, prepare_files, prepare_standard_library
from gva.data.shards import TokenDataset
from gva.data.tokenizer import load_tokenizer, train_bpe

TEXTS = [f"Document {i}: " + "the quick brown fox, ümläut and 漢字. " * (i % 7 + 1) for i in range(250)]


def jsonl(texts=TEXTS) -> bytes:
    return "".join(json.dumps({"text": t, "id": i}) + "\n" for i, t in enumerate(texts)).encode()


def parquet(texts=TEXTS) -> bytes:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), sink, row_group_size=50)
    return sink.getvalue()


def compressed(content: bytes, suffix: str) -> bytes:
    if suffix == ".zst":
        return pytest.importorskip("zstandard").ZstdCompressor().compress(content)
    return {"": lambda x: x, ".gz": gzip.compress, ".xz": lzma.compress}[suffix](content)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet"])
def test_every_format_is_read(tmp_path, kind, suffix):
    content = {"jsonl": jsonl, "txt": lambda: "".join(TEXTS).encode(), "parquet": parquet}[kind]()
    path = tmp_path / f"a.{kind}{suffix}"
    path.write_bytes(compressed(content, suffix))
    assert list(read_documents(path)) == (["".join(TEXTS)] if kind == "txt" else TEXTS)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_truncated_files_are_named(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    whole = compressed(jsonl() * 20, suffix)
    for content in (whole[:-10], whole[: len(whole) // 2], b"not compressed at all"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"a.jsonl{suffix}: truncated or not a {suffix} file"):
            list(read_documents(path))


def test_frames_of_zst_are_read_one_after_another_and_not_held(tmp_path):
    zstandard, path = pytest.importorskip("zstandard"), tmp_path / "a.txt.zst"
    text = "".join(f"{number} is a number\n" for number in range(2**18)).encode()
    places = [0, 1, 10**6, 10**6, len(text)]  # an empty one among them
    frames = [zstandard.ZstdCompressor().compress(text[a:b]) for a, b in pairwise(places)]
    path.write_bytes(b"".join(frames))
    tracemalloc.start()
    size = sum(map(len, read_documents(path)))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == len(text) > 4e6
    assert most < 2e6
    assert b"".join(_open_zst(path)) == text
    rng, whole = random.Random(0), sum(map(len, frames))
    ends = {sum(map(len, frames[:number])) for number in range(5)}
    for cut in (1, 4, 9, *rng.sample(range(whole), 9)):
        path.write_bytes(b"".join(frames)[:cut])
        with pytest.raises(DataError, match="truncated") if cut not in ends else nullcontext():
            list(read_documents(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a.jsonl: line 2 is not JSON"),
        ("a.jsonl", b'{"body": "x"}\n', r"a.jsonl: line 1 has no text in field 'text' \(it has \['body'\]\)"),
        ("a.jsonl", b"[1]\n", r"line 1 is a list, must be an object"),
        ("a.txt", b"\xff\xfe\x00", r"a.txt: not UTF-8 text \(byte 0\)"),
        ("a.parquet", b"PAR1 nothing", r"a.parquet: truncated or not a parquet file"),
        ("a.csv", b"x", r"a.csv: cannot be read; known are .jsonl"),
    ],
)
def test_foreign_files_are_named(tmp_path, name, content, message):
    if "parquet" in name:
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_documents(tmp_path / name))
    with pytest.raises(DataError, match="no such file"):
        list(read_documents(tmp_path / "missing.jsonl"))


@pytest.fixture
def inputs(tmp_path):
    paths = []
    for number in range(3):
        path = tmp_path / f"part-{number}.jsonl.xz"
        path.write_bytes(lzma.compress(jsonl(TEXTS[number * 70 : (number + 1) * 70 + 40])))
        paths.append(path)
    return paths


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_shards_hold_the_documents(tmp_path, inputs):
    index = prepare_files(inputs, tmp_path / "out", vocab_size=400, workers=2, progress=False)
    train, valid = (TokenDataset(tmp_path / "out", split) for split in ("train", "valid"))
    train.verify()
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    texts = [text for path in inputs for text in read_documents(path)]
    held_out = [text for text in texts if is_held_out(text, 100)]
    assert len(texts) == 330
    assert 1 <= len(held_out) <= 12
    ends = train.document_ends
    assert len(ends) == len(texts) - len(held_out)
    first = train.read(0, int(ends[0]))
    assert tokenizer.tokenizer.decode(first[:-1].tolist()) == texts[0]
    assert first[-1] == tokenizer.end == index["end_of_text"]
    crossing = train.read(int(train.shards[0].tokens) - 5, int(train.shards[0].tokens) + 5)
    assert len(crossing) == 10
    assert sum(s.bytes for s in train.shards) == sum(len(t.encode()) for t in texts if t not in held_out)
    assert train.text_bytes(0, len(train)) == sum(s.bytes for s in train.shards)
    assert train.text_bytes(0, int(ends[0])) == len(texts[0].encode()), "its end token has no bytes"
    assert valid.read(0, len(valid)).tolist().count(tokenizer.end) == len(held_out)
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer").eos_token_id == tokenizer.end
    assert index["provenance"]["inputs"] == [p.name for p in inputs]


def test_workers_and_repetition_change_no_byte(tmp_path, inputs):
    for name, workers in (("one", 1), ("two", 2)):
        prepare_files(inputs, tmp_path / name, vocab_size=400, workers=workers, progress=False)
    once = snapshot(tmp_path / "one")
    assert once == snapshot(tmp_path / "two")
    prepare_files(inputs, tmp_path / "one", vocab_size=400, progress=False)
    assert snapshot(tmp_path / "one") == once


def test_a_kill_loses_no_finished_file(tmp_path, inputs):
    """Killed as soon as the first file is done, whose held-out part is written last; the next run keeps its shards and
    ends with the same bytes."""
    prepare_files(inputs, tmp_path / "whole", vocab_size=400, progress=False)
    out = tmp_path / "killed"
    words = [str(p) for p in inputs] + ["--out", str(out), "--vocab-size", "400", "--workers", "1"]
    run = subprocess.Popen([sys.executable, "-m", "gva.cli", "data", "prepare", *words], start_new_session=True)
    deadline = time.monotonic() + 120
    while not (out / "valid-00000.json").is_file() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    written = (out / "train-00000.tokens").stat().st_mtime_ns
    prepare_files(inputs, out, vocab_size=400, progress=False)
    assert (out / "train-00000.tokens").stat().st_mtime_ns == written, "the finished shard was kept"
    assert {k: v for k, v in snapshot(out).items() if ".tmp" not in k} == snapshot(tmp_path / "whole")


def test_a_validation_file_of_its_own(tmp_path, inputs):
    prepare_files(inputs[:2], tmp_path / "out", valid=inputs[2:], vocab_size=400, progress=False)
    assert len(TokenDataset(tmp_path / "out").document_ends) == 220
    assert len(TokenDataset(tmp_path / "out", "valid").document_ends) == 110


def test_damaged_shards_are_refused(tmp_path, inputs):
    out = tmp_path / "out"
    prepare_files(inputs, out, vocab_size=400, progress=False)
    tokens = out / "train-00001.tokens"
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"train-00001.tokens: \d+ bytes where the index says"):
        TokenDataset(out)
    flipped = bytearray(content)
    flipped[10] ^= 1
    tokens.write_bytes(bytes(flipped))
    with pytest.raises(DataError, match="train-00001: checksum differs"):
        TokenDataset(out).verify()
    tokens.unlink()
    with pytest.raises(DataError, match=r"train-00001.tokens: missing"):
        TokenDataset(out)
    with pytest.raises(DataError, match="no split 'test'"):
        TokenDataset(out, "test")
    with pytest.raises(DataError, match=r"no index.json; make the dataset with: gva data prepare"):
        TokenDataset(tmp_path)


def test_tokenizers_from_files(tmp_path):
    with pytest.raises(DataError, match="no such tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizer"):
        load_tokenizer(tmp_path)
    train_bpe(TEXTS, 300).save(tmp_path)
    with pytest.raises(DataError, match="no token '<stop>'"):
        load_tokenizer(tmp_path, end="<stop>")
    saved = load_tokenizer(tmp_path / "tokenizer.json")
    assert saved.tokenizer.id_to_token(saved.end) == "<|endoftext|>"
    plain = json.loads(Tokenizer.from_file(str(tmp_path / "tokenizer.json")).to_str())
    plain["added_tokens"] = []
    plain["model"]["vocab"].pop("<|endoftext|>", None)
    (tmp_path / "bare.json").write_text(json.dumps(plain))
    with pytest.raises(DataError, match="say with --end"):
        load_tokenizer(tmp_path / "bare.json")


def test_training_a_tokenizer_is_repeatable():
    assert train_bpe(TEXTS, 350).fingerprint == train_bpe(TEXTS, 350).fingerprint


def test_large_vocabularies_take_four_bytes(tmp_path, inputs):
    bpe = train_bpe(TEXTS, 300)
    bpe.tokenizer.add_tokens([f"<{i}>" for i in range(66_000)])
    bpe.save(tmp_path / "large")
    prepare_files(inputs[:1], tmp_path / "out", tokenizer=tmp_path / "large", progress=False)
    dataset = TokenDataset(tmp_path / "out")
    assert dataset.shards[0].dtype == "uint32"
    assert dataset.read(0, 10).dtype == np.int64


def test_the_standard_library_needs_nothing(tmp_path):
    index = prepare_standard_library(tmp_path, progress=False)
    assert index["vocab_size"] == 2048
    assert index["tokens"]["train"] > 1_000_000
    assert index["tokens"]["valid"] > 30_000
    assert not list(tmp_path.glob("*.jsonl")), "no text is kept"
    tokens = TokenDataset(tmp_path).read(0, 20_000).tolist()
    assert "import" in load_tokenizer(tmp_path / "tokenizer").tokenizer.decode(tokens)


def test_a_dataset_folder_is_streamed_and_resumed(tmp_path):
    pytest.importorskip("datasets")
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "train-0.jsonl").write_bytes(jsonl(TEXTS[:120]))
    (folder / "train-1.jsonl").write_bytes(jsonl(TEXTS[120:]))
    options = {"vocab_size": 400, "shard_documents": 100, "progress": False}
    index = prepare_dataset(str(folder), tmp_path / "whole", **options)
    assert sum(s["documents"] for split in index["splits"].values() for s in split) == 250
    assert len(index["splits"]["train"]) == 3
    prepare_dataset(str(folder), tmp_path / "sampled", max_documents=120, **options)
    with pytest.raises(DataError, match="differs in sample: '"):
        prepare_dataset(str(folder), tmp_path / "sampled", **options)
    options = {"tokenizer": tmp_path / "whole" / "tokenizer", "shard_documents": 100, "progress": False}
    prepare_dataset(str(folder), tmp_path / "grown", max_documents=120, **options)
    prepare_dataset(str(folder), tmp_path / "grown", **options)
    assert len(TokenDataset(tmp_path / "grown")) > 0
    grown = TokenDataset(tmp_path / "grown").index
    assert sum(s["documents"] for split in grown["splits"].values() for s in split) == 250, "nothing was lost"
    options = {"vocab_size": 400, "shard_documents": 100, "progress": False}
    (tmp_path / "part").mkdir()
    for name in snapshot(tmp_path / "whole"):
        if name.startswith(("tokenizer", "train-00000", "valid-00000")):
            (tmp_path / "part" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "part" / name).write_bytes((tmp_path / "whole" / name).read_bytes())
    prepare_dataset(str(folder), tmp_path / "part", **options)
    assert snapshot(tmp_path / "part") == snapshot(tmp_path / "whole")
    with pytest.raises(DataError, match=r"row 0 has no text in field 'body' \(it has \['id', 'text'\]\)"):
        prepare_dataset(str(folder), tmp_path / "bad", field="body", progress=False)


def test_whole_files_as_documents_are_held_out_too(tmp_path):
    paths = []
    for number, text in enumerate(TEXTS):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_text(text)
    index = prepare_files(paths, tmp_path / "out", vocab_size=300, progress=False)
    assert index["tokens"]["valid"] > 0
    for count in (1, 2, 10):
        index = prepare_files(paths[:count], tmp_path / str(count), vocab_size=300, hold_out=10**9, progress=False)
        train, valid = (sum(shard["bytes"] for shard in index["splits"][split]) for split in ("train", "valid"))
        assert train + valid == sum(len(text.encode()) for text in TEXTS[:count])
        assert 0 < valid < train, "something is held out, however few documents there are"


def test_a_spelt_out_special_token_ends_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl([*TEXTS, "before <|endoftext|> after"]))
    prepare_files([tmp_path / "a.jsonl"], tmp_path / "out", vocab_size=400, progress=False)
    datasets = [TokenDataset(tmp_path / "out", split) for split in ("train", "valid")]
    ends = sum(d.read(0, len(d)).tolist().count(d.index["end_of_text"]) for d in datasets)
    assert ends == len(TEXTS) + 1


def test_workers_end_with_their_parent(tmp_path, inputs):
    """Killed without a word, the parent leaves no orphan that goes on writing."""
    many = [tmp_path / f"copy-{i}.jsonl.xz" for i in range(400)]
    for path in many:
        path.write_bytes(inputs[0].read_bytes())
    out = tmp_path / "out"
    words = [*map(str, many), "--out", str(out), "--vocab-size", "300", "--workers", "2"]
    run = subprocess.Popen([sys.executable, "-m", "gva.cli", "data", "prepare", *words], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(out.glob("train-*.json")) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    run.kill()
    run.wait()
    time.sleep(2.5)
    written = len(list(out.glob("train-*.json")))
    time.sleep(1.5)
    assert len(list(out.glob("train-*.json"))) == written < 400


def test_the_command_line(tmp_path, inputs, capsys):
    out = tmp_path / "out"
    assert main(["data", "prepare", *map(str, inputs), "--out", str(out), "--vocab-size", "400", "--workers", "1"]) == 0
    assert "train tokens" in capsys.readouterr().out
    assert main(["data", "verify", str(out)]) == 0
    assert main(["data", "prepare", "--out", str(out), "--tokenizer", "t.json"]) == 2
    assert "--tokenizer: the standard library" in capsys.readouterr().err
    assert main(["data", "prepare", "--out", str(out), "--valid", "v.jsonl"]) == 2
    assert "--valid goes with input files" in capsys.readouterr().err
    assert main(["data", "prepare", str(tmp_path / "no.jsonl"), "--out", str(out)]) == 2
    assert "no.jsonl: no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["data", "prepare", "--out", str(out), "--vocabsize", "4"])
    assert "did you mean '--vocab-size'?" in capsys.readouterr().err


def test_the_real_corpus(tmp_path):
    corpus = Path(os.environ.get("GVA_CORPUS", Path(__file__).parents[3] / "shared" / "data" / "corpus"))
    if not (corpus / "valid.jsonl.xz").is_file():
        pytest.skip("no corpus; point GVA_CORPUS at a folder with valid.jsonl.xz")
    prepare_files([corpus / "valid.jsonl.xz"], tmp_path, vocab_size=1000, progress=False)
    assert len(TokenDataset(tmp_path)) > 1_000_000
