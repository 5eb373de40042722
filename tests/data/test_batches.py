"""The order of data: fixed by a seed, the same for all ranks together, every sequence once per epoch."""

import numpy as np
import pytest
import torch

from gva.data.batches import IGNORED, Batches
from gva.data.documents import DataError
from gva.data.shards import FORMAT, TokenDataset, write_shard


@pytest.fixture
def dataset(tmp_path):
    """Two shards of documents 0, 1, 2, ... whose tokens tell where they stand."""
    rng, shards, token = np.random.default_rng(0), [], 0
    for number in range(2):
        documents = []
        for length in rng.integers(1, 30, 20):
            documents.append(np.arange(token, token + length, dtype=np.uint16))
            token += int(length)
        shards.append(write_shard(tmp_path, f"train-{number:05d}", documents, 0, {}))
    import json
    from dataclasses import asdict

    index = {"format": FORMAT, "vocab_size": token, "splits": {"train": [asdict(s) for s in shards]}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    return TokenDataset(tmp_path)


def test_labels_are_the_next_tokens(dataset):
    batches = Batches(dataset, length=16, batch=4, seed=0)
    batch = batches.load(batches.indices(0))
    assert batch["input_ids"].shape == batch["labels"].shape == (4, 16)
    assert torch.equal(batch["labels"], batch["input_ids"] + 1)
    assert (batch["input_ids"][:, 0] % 16 == 0).all()


def test_each_epoch_shows_every_sequence_once_in_another_order(dataset):
    batches = Batches(dataset, length=16, batch=1, seed=0)
    count = batches.sequences
    epochs = [[batches.indices(step)[0] for step in range(e * count, (e + 1) * count)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(count))
    assert epochs[0] != epochs[1]


def test_the_seed_fixes_the_order_and_batches_may_cross_epochs(dataset):
    a, b, c = (Batches(dataset, 16, 5, seed) for seed in (1, 1, 2))
    steps = range(30)
    assert [a.indices(s) for s in steps] == [b.indices(s) for s in reversed(steps)][::-1]
    assert [a.indices(s) for s in steps] != [c.indices(s) for s in steps]


def test_positions_start_again_at_documents(dataset):
    batches = Batches(dataset, length=64, batch=1, seed=0, document_mask=True)
    starts = {0, *dataset.document_ends.tolist()}
    for index in range(batches.sequences):
        batch = batches.load([index])
        tokens, positions, labels = (batch[k][0].tolist() for k in ("input_ids", "position_ids", "labels"))
        for i, token in enumerate(tokens):
            begun = max(s for s in starts if s <= token)
            assert positions[i] == token - max(begun, index * 64)
            assert labels[i] == (IGNORED if token + 1 in starts else token + 1)


def test_too_little_data_is_refused(dataset):
    with pytest.raises(DataError, match=r"do not fill one sequence of 4096; use more data or a shorter sequence"):
        Batches(dataset, 4096, 1, 0)
