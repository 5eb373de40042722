"""Tokenizers: any HuggingFace tokenizer.json, or a byte-level BPE trained on the data at hand."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gva.data.documents import DataError
from gva.data.pieces import LONG, is_cut_by_words, pieces
from gva.run.atomic import write_atomically
from gva.run.files import read_object

END_OF_TEXT = "<|endoftext|>"
FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and the token that ends a document."""

    tokenizer: Tokenizer
    end: int

    @property
    def vocab_size(self) -> int:
        """One more than the largest id: what an embedding must hold."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.end} {self.tokenizer.to_str()}".encode()).hexdigest()[:16]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, its end token last."""
        return [[*ids, self.end] for ids in self.ids(texts)]

    def ids(self, texts: list[str]) -> list[list[int]]:
        """The same without end tokens."""
        return [encoded.ids for encoded in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def pieces(self, text: str) -> Iterator[str]:
        """A long text in pieces whose ids, joined, are those of the whole; all of it where that is not sure."""
        return pieces(text) if len(text) > LONG and self._is_cut_by_words else iter([text])

    @cached_property
    def _is_cut_by_words(self) -> bool:
        return is_cut_by_words(json.loads(self.tokenizer.to_str()))

    def files(self, **more: int) -> dict[str, str]:
        """What a folder holds that AutoTokenizer loads, by the names of files; `more` is noted in its settings."""
        end = self.tokenizer.id_to_token(self.end)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "model_max_length": 10**9, **more}
        return {FILE: self.tokenizer.to_str(pretty=True), SETTINGS: json.dumps(settings, indent=2)}

    def save(self, folder: Path, **more: int) -> None:
        """Write such a folder. What is there already, byte for byte, stays."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files(**more).items():
            path = folder / name
            if not path.is_file() or path.read_bytes() != content.encode():
                write_atomically(path, content)


def load_tokenizer(path: Path, end: str | None = None) -> TextTokenizer:
    """From a tokenizer.json or the folder that holds one. The end token is `end`, or the folder's eos_token,
    or whichever of the usual names the vocabulary has."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{file}: no such tokenizer; give a tokenizer.json or the folder that holds one")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{file}: not a tokenizer ({error})") from error
    tokenizer.encode_special_tokens = True  # a document that spells out a special token does not end there
    tokenizer.no_truncation()
    tokenizer.no_padding()
    declared = tokenizer_settings(file.parent).get("eos_token")
    declared = declared.get("content") if isinstance(declared, dict) else declared
    names = [n for n in (end, declared, END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>") if n]
    ids = [tokenizer.token_to_id(name) for name in names]
    if end is not None and ids[0] is None:
        raise DataError(f"{file}: no token {end!r} to end documents with")
    found = next((i for i in ids if i is not None), None)
    if found is None:
        raise DataError(f"{file}: none of {names} is a token; say with --end which one ends a document")
    return TextTokenizer(tokenizer, found)


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """What a tokenizer's folder says of it besides its vocabulary."""
    path = folder / SETTINGS
    return read_object(path, "copy it again") if path.is_file() else {}


def train_bpe(texts: Iterable[str], vocab_size: int, progress: bool = False) -> TextTokenizer:
    """A byte-level BPE; the same texts in the same order give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    return TextTokenizer(tokenizer, end)
