"""Associative recall: what is asked can be answered, the same for everyone, and more of it as it is learned."""

import json
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch

from gva.cli import main
from gva.data import recall
from gva.data.batches import IGNORED
from gva.data.documents import DataError
from gva.data.same import check_own
from gva.data.shards import TokenDataset
from gva.data.source import make_batches, open_data
from gva.run.metrics import read_metrics
from gva.train import loop
from gva.train.recipe import build

MODEL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_value_groups": 2, "value_head_dim": 16,
    "intermediate_size": 128, "tie_word_embeddings": False, "initializer_range": 0.125, "eval_every": 1000,
    "document_mask": True, "checkpoint_every": 1000,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    recall.write_recall(tmp_path / "data", keys=64, values=40, pairs=8, every=2)
    return tmp_path / "data"


def batches(folder, batch=6, split="train", seed=3):
    return make_batches(open_data(folder, split), 24, batch, seed, True)


def samples(tokens, labels, positions):
    """Of one row: the pairs, what is asked, and the answers."""
    starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(tokens)]
    for first, last in pairwise(starts):
        told = (last - first) // 3 * 2
        yield tokens[first : first + told].view(-1, 2), tokens[first + told : last], labels[first:last]


def test_every_key_is_answered_by_its_value(folder):
    found = batches(folder, 40)
    found.pairs.fill_(8)
    batch = found.load(found.indices(5))
    counts = set()
    for row in zip(*(batch[name] for name in ("input_ids", "labels", "position_ids")), strict=True):
        seen = [pair for pairs, _, _ in samples(*row) for pair in pairs[:, 0].tolist()]
        assert len(seen) == len(set(seen)) == 8, "no key twice in a row, whatever it is cut into"
        for pairs, asked, labels in samples(*row):
            counts.add(len(pairs))
            value = dict(pairs.tolist())
            assert max(value) < 64 <= min(value.values()) < 104
            assert (labels[: 2 * len(pairs)] == IGNORED).all()
            assert labels[2 * len(pairs) :].tolist() == [value[key] for key in asked.tolist()]
            assert sorted(asked.tolist()) == sorted(value)
    assert counts == {2, 4, 8}


def test_rows_depend_on_seed_step_and_stage_alone(folder):
    one, two = batches(folder), batches(folder)
    whole = one.load(one.indices(4))
    parts = [two.load(two.indices(4)[start::2]) for start in (0, 1)]
    for name, tensor in whole.items():
        assert torch.equal(tensor[0::2], parts[0][name])
        assert torch.equal(tensor[1::2], parts[1][name])
    others = [batches(folder, seed=4).load(one.indices(4)), one.load(one.indices(5))]
    others.append(batches(folder, split="valid").load(one.indices(4)))
    assert not any(torch.equal(whole["input_ids"], other["input_ids"]) for other in others)
    assert open_data(folder).fingerprint != open_data(folder, "valid").fingerprint


def test_twice_as_many_pairs_once_they_are_answered(folder):
    found = batches(folder)
    held = found.state["recall.pairs"]
    for accuracy, wanted in ((0.9, 2), (0.91, 4), (0.5, 4), (0.95, 8), (1.0, 8)):
        found.learned(dict.fromkeys((2, 4, 8, 16, 32), accuracy))
        assert held.item() == wanted, "the tensor that a checkpoint is read into"
    tests = dict(found.tests())
    assert list(tests) == [2, 4, 8, 16, 32]
    assert all((batch["labels"] != IGNORED).sum() == recall.ANSWERS for batch in tests.values())
    assert tests[32]["input_ids"].shape == (64, 96)


def test_numbers_that_differ_are_drawn_evenly():
    drawn = recall.different(np.random.default_rng(0), 4000, 3, 4)
    assert all(len(set(row)) == 3 for row in drawn.tolist())
    assert np.bincount(drawn.flatten()) / 4000 == pytest.approx([0.75] * 4, abs=0.03)


def train(folder, out, variant="gqa", **fields):
    pairs = open_data(folder).pairs
    sizes = {"length": 3 * pairs, "max_position_embeddings": 12 * pairs, "warmup": 2, **fields}
    config, recipe = build("demo", variant, {**MODEL, **sizes}, open_data(folder).vocab_size)
    loop.train(config, recipe, folder, out, device="cpu", progress=False)


def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(recall, "MASTERED", -1.0)  # twice as many pairs at every test
    fields = {"steps": 8, "global_batch": 4, "micro_batch": 2, "checkpoint_every": 3, "log_every": 1}
    train(folder, tmp_path / "whole", **fields)
    step, calls = loop.train_step, []

    def fails(run):
        calls.append(run.step)
        if len(calls) == 6:
            raise RuntimeError("a power cut")
        return step(run)

    monkeypatch.setattr(loop, "train_step", fails)
    with pytest.raises(RuntimeError, match="a power cut"):
        train(folder, tmp_path / "cut", **fields)
    train(folder, tmp_path / "cut", **fields)
    assert calls[6] == 3, "from the checkpoint after step 3"
    for kind, name in (("step", "loss"), ("recall", "accuracy"), ("recall", "pairs"), ("eval", "valid_loss")):
        ours, theirs = ([line[name] for line in read_metrics(tmp_path / run, kind)] for run in ("cut", "whole"))
        assert ours == theirs
    assert [line["pairs"] for line in read_metrics(tmp_path / "whole", "recall")] == [4, 8, 8, 8]


@pytest.mark.parametrize(("name", "change", "told"), [
    ("index.json", lambda text: text.replace('"every": 2', '"every": 3', 1), "differs from what was written"),
    ("index.json", lambda text: text.replace('"pairs": 8', '"pairs": 6'), "pairs=6: must be a power of two"),
    ("index.json", lambda text: text.replace('"keys": 64', f'"keys": {10**9}'), "must be 1,048,576 at most"),
    ("index.json", lambda text: text.replace('"task"', '"tusk"'), "without the numbers of a task"),
    ("tokenizer/tokenizer.json", lambda text: text.replace('"k3"', '"k03"'), "differs from what was written"),
    ("tokenizer/tokenizer_config.json", lambda text: "", "differs from what was written"),
])  # fmt: skip
def test_damage_is_told(name, change, told, folder, capsys):
    assert main(["data", "verify", str(folder)]) == 0
    (folder / name).write_text(change((folder / name).read_text()))
    assert main(["data", "verify", str(folder)]) == 2
    said = capsys.readouterr().err
    assert str(folder / name) in said
    assert told in said
    assert said.endswith("make it again, with gva data recall: remove this folder first\n")


def test_another_tokenizer_is_not_trained_with(folder):
    check_own(open_data(folder))
    recall.write_recall(folder.parent / "other", keys=64, values=41, pairs=8)
    shutil.copytree(folder.parent / "other" / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    with pytest.raises(DataError, match="not the tokenizer that the tokens beside it were made with"):
        check_own(open_data(folder))


def test_the_command_and_what_is_refused(tmp_path, capsys, folder):
    assert main(["data", "recall", "--out", str(tmp_path / "it"), "--keys", "64", "--pairs", "8"]) == 0
    assert "length=24 document_mask=true max_position_embeddings=96" in capsys.readouterr().out
    assert json.loads((tmp_path / "it" / "index.json").read_text())["task"]["pairs"] == 8
    for words, told in (
        (["--pairs", "6"], "pairs=6: must be a power of two"),
        (["--keys", "9"], "keys=9: must be 512"),
    ):
        assert main(["data", "recall", "--out", str(tmp_path / "no"), *words]) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    before = (tmp_path / "it" / "index.json").read_bytes()
    assert main(["data", "recall", "--out", str(tmp_path / "it"), "--keys", "64", "--pairs", "4"]) == 2
    assert f"{tmp_path / 'it'}: holds other data" in capsys.readouterr().err
    assert main(["data", "recall", "--out", str(tmp_path / "it"), "--keys", "64", "--pairs", "8"]) == 0
    assert (tmp_path / "it" / "index.json").read_bytes() == before
    with pytest.raises(ValueError, match=r"length=48: a row of up to 8 pairs has 24 tokens"):
        make_batches(open_data(folder), 48, 4, 0, True)
    with pytest.raises(ValueError, match=r"document_mask=False: samples lie side by side"):
        make_batches(open_data(folder), 24, 4, 0)
    with pytest.raises(DataError, match="format 'recall'"):
        TokenDataset(folder)


def test_gqa_learns_to_recall(tmp_path):
    """The toy of studies/recall.toml, in a minute."""
    recall.write_recall(tmp_path / "data", keys=256, values=256, pairs=8, every=20)
    fields = {"steps": 560, "lr": 1e-2, "warmup": 50, "global_batch": 128, "micro_batch": 128}
    train(tmp_path / "data", tmp_path / "run", **fields)
    tests = read_metrics(tmp_path / "run", "recall")
    assert [line["pairs"] for line in tests] == sorted(line["pairs"] for line in tests)
    assert tests[0]["accuracy"]["8"] < 0.2
    assert tests[-1]["accuracy"]["8"] > 0.9
