"""A BPE from a process of its own: the same bytes, an end with its parent, no module of the folder one stands in."""

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gva.data import bpe
from gva.data.bpe import train_apart
from gva.data.documents import DataError
from gva.data.tokenizer import train_bpe

ROOT = Path(__file__).parents[2]
TEXTS = ["the quick brown fox, ümläut and 漢字 " * 30, "", "line\nend\r\n\t é\U0001f600 " * 9, "word " * 40_000]


def test_it_is_the_tokenizer_that_this_process_would_train():
    assert train_apart(TEXTS, 350).files() == train_bpe(TEXTS, 350).files()


def test_what_is_wrong_with_a_text_is_raised_here():
    def texts():
        yield "a text"
        raise DataError("a.jsonl: line 2 is not JSON")

    with pytest.raises(DataError, match="line 2"):
        train_apart(texts(), 300)


@pytest.mark.parametrize("moment", ["midway", "at the end"])
def test_a_process_that_is_killed_says_so(moment, monkeypatch):
    started = []

    def start(*words, **settings):
        started.append(subprocess.Popen(*words, **settings))
        return started[0]

    def texts():
        for number in range(3000):
            yield f"{number} {number * 7919} " * 500
            if number == 1000 and moment == "midway":
                started[0].kill()
        started[0].kill()

    monkeypatch.setattr(bpe, "subprocess", type("", (), {"Popen": start, "PIPE": subprocess.PIPE}))
    with pytest.raises(DataError, match="ended with -9, as for want of memory; give it more, or a tokenizer"):
        train_apart(texts(), 300)


def test_it_ends_with_its_parent(tmp_path):
    code = """
import sys, gva.data.bpe as bpe
def texts():
    for number in range(400_000):
        yield f'{number * 7919} {number * 104729} {number}'
    print(bpe.started.pid, flush=True)
class Popen(bpe.subprocess.Popen):
    def __init__(self, *words, **settings):
        super().__init__(*words, **settings)
        bpe.started = self
bpe.subprocess.Popen = Popen
bpe.train_apart(texts(), 60_000)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    time.sleep(0.5)  # it has all texts by now, and is at work on them for some seconds
    os.kill(child, 0)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 2
    while Path(f"/proc/{child}/status").exists() and "zombie" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline, "it goes on without its parent"
        time.sleep(0.05)


def test_modules_of_the_folder_that_one_stands_in_are_not_run(tmp_path, monkeypatch):
    (tmp_path / "tokenizers.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    assert train_apart(TEXTS, 300).vocab_size == 300
    assert not (tmp_path / "ran").exists()


def test_the_memory_of_a_preparation(tmp_path):
    """Of a small one, which is that of its processes: without torch, and the words not beside the tokens."""
    measure = runpy.run_path(str(ROOT / "benchmarks" / "prepare.py"))
    measure["write"](tmp_path / "a.jsonl", 4_000_000, True)
    words = ["data", "prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--vocab-size", "300"]
    megabytes, _ = measure["peak"]([sys.executable, "-m", "gva.cli", *words])
    assert 20 < megabytes < 200
