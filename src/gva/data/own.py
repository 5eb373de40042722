"""What `--data` of a command means: a prepared folder, or texts, which are prepared in the folder of the run."""

import os
import time
from pathlib import Path

from gva.data.documents import KINDS, DataError, files_in
from gva.data.prepare import prepare_files, prepare_standard_library
from gva.data.shards import INDEX, PREPARATION

SMALL = 10 * 2**20  # bytes of text, for which a BPE of SMALL_VOCABULARY does
SMALL_VOCABULARY, VOCABULARY = 2048, 16384


def settle_data(given: Path | None, out: Path, progress: bool = True, tokenizer: Path | None = None) -> Path:
    """The prepared folder to train on: the one given; or `out`/data, which is made of the texts given or, where nothing
    is given and nothing there yet, of the standard library. Texts are cut by `tokenizer`, or by a BPE trained on them.
    The first rank prepares, the others wait."""
    if given is not None and ((given / INDEX).is_file() or (given / PREPARATION).is_file()):
        return given  # an unfinished one is told where it is opened
    data = out / "data"
    texts = [] if given is None else _texts(given, out)
    if texts or not (data / INDEX).is_file():
        if int(os.environ.get("RANK", "0")) == 0:
            _prepare(texts, data, progress, tokenizer)
        while not (data / INDEX).is_file():
            time.sleep(0.2)
    return data


def _texts(given: Path, out: Path) -> list[Path]:
    if not given.exists():
        raise DataError(f"--data {given}: no such file or folder; give texts, or a folder made by gva data prepare")
    if (given / "data" / INDEX).is_file():
        raise DataError(f"--data {given}: is a run or a comparison; what it was trained on is {given / 'data'}")
    texts = files_in(given, but=out)
    if not texts:
        raise DataError(
            f"--data {given}: is not prepared (no {INDEX}), and holds no text ({', '.join(KINDS)}); give texts, or a "
            "folder made by gva data prepare"
        )
    return texts


def _prepare(texts: list[Path], data: Path, progress: bool, tokenizer: Path | None) -> None:
    if not texts:
        print("No --data: preparing the source of Python's standard library", flush=True)
        prepare_standard_library(data, progress=progress)
        return
    size = SMALL_VOCABULARY if sum(path.stat().st_size for path in texts) < SMALL else VOCABULARY
    print(f"Preparing {len(texts)} {'file' if len(texts) == 1 else 'files'} of text in {data}", flush=True)
    workers = os.cpu_count() or 1
    prepare_files(texts, data, tokenizer=tokenizer, vocab_size=size, workers=workers, progress=progress)
