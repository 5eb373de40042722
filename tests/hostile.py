"""What a stranger puts into a folder: Python that leaves a file where it ran, and other fields in its JSON."""

import io
import json

import pytest

CODE = """
import pathlib
pathlib.Path({made!r}).touch()
from transformers import LlamaConfig as Theirs, LlamaForCausalLM as Model
from transformers import LlamaTokenizer as Tokenizer, PreTrainedTokenizerFast
"""


@pytest.fixture(autouse=True)
def yes(monkeypatch):
    """Whoever is asked says yes."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))


def change(path, **fields):
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | fields))
