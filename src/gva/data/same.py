"""Whether text and tokens belong together: the tokenizers of a model and of data are compared wherever these meet."""

import hashlib
import json
from pathlib import Path

from tokenizers import Tokenizer

from gva.data.documents import DataError
from gva.data.source import Dataset
from gva.data.tokenizer import FILE, load_tokenizer


def check_own(data: Dataset) -> None:
    """Raise DataError if the tokenizer of a prepared folder is not the one that its tokens were made with."""
    folder, made_with = data.folder / "tokenizer", data.index.get("tokenizer")
    found = load_tokenizer(folder).fingerprint
    if made_with not in (None, found):
        raise DataError(
            f"{folder}: not the tokenizer that the tokens beside it were made with (its fingerprint is {found}, in the "
            f"index stands {made_with}); copy the folder again, or prepare it again"
        )


def cutting(path: Path) -> str:
    """A fingerprint of what of a tokenizer, a folder or a file, cuts text. Two that cut alike may add other tokens."""
    file = path / FILE if path.is_dir() else path
    try:
        parts = json.loads(Tokenizer.from_file(str(file)).to_str())
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{file}: not a tokenizer ({error}); copy it again") from None
    told = json.dumps([parts[name] for name in ("normalizer", "pre_tokenizer", "model")], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def check_same(tokenizer: Path, known: str | None, of: Path, remedy: str) -> None:
    """Raise DataError unless a tokenizer cuts text as the one `known` by its fingerprint, which is that of `of`."""
    if known is not None and (found := cutting(tokenizer)) != known:
        raise DataError(
            f"{tokenizer}: another tokenizer than that of {of} (it cuts text by {found}, not by {known}); {remedy}"
        )
