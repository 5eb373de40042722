"""What a run trains on, of whichever kind a prepared folder is."""

import json
from pathlib import Path

from gva.data.batches import Batches
from gva.data.recall import FORMAT, Recall, RecallBatches
from gva.data.shards import INDEX, TokenDataset

Dataset = TokenDataset | Recall


def open_data(folder: Path, split: str = "train") -> Dataset:
    index = folder / INDEX
    recall = index.is_file() and json.loads(index.read_text()).get("format") == FORMAT
    return Recall(folder, split) if recall else TokenDataset(folder, split)


def make_batches(dataset: Dataset, length: int, batch: int, seed: int, document_mask: bool = False) -> Batches:
    kind = RecallBatches if isinstance(dataset, Recall) else Batches
    return kind(dataset, length, batch, seed, document_mask)  # type: ignore[arg-type]
