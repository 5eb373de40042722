"""What a run trains on, of whichever kind a prepared folder is."""

from pathlib import Path

from gva.data import preparation, recall
from gva.data.batches import Batches
from gva.data.recall import FORMAT, Recall, RecallBatches
from gva.data.shards import INDEX, REMEDY, TokenDataset
from gva.run.files import read_object

Dataset = TokenDataset | Recall


def open_data(folder: Path, split: str = "train") -> Dataset:
    return Recall(folder, split) if is_recall(folder) else TokenDataset(folder, split)


def is_recall(folder: Path) -> bool:
    index = folder / INDEX
    return index.is_file() and read_object(index, REMEDY).get("format") == FORMAT


def verify(folder: Path) -> None:
    """Compare every file of a prepared folder with what was written."""
    (recall if is_recall(folder) else preparation).verify(folder)


def make_batches(dataset: Dataset, length: int, batch: int, seed: int, document_mask: bool = False) -> Batches:
    kind = RecallBatches if isinstance(dataset, Recall) else Batches
    return kind(dataset, length, batch, seed, document_mask)  # type: ignore[arg-type]


def described(dataset: Dataset) -> str:
    """What a run on it learns from, in words: how much, of which vocabulary, and where it came from."""
    index = dataset.index
    source = {name: value for name, value in index["provenance"].items() if name != "gva" and value is not None}
    told = "; ".join(
        f"{name}: {_listed(value) if isinstance(value, list) else value}" for name, value in source.items()
    )
    counts = " and ".join(f"{tokens:,} {split} tokens" for split, tokens in index["tokens"].items()) or "Fresh tokens"
    return f"{counts} of a vocabulary of {index['vocab_size']:,}, from {told}"


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
