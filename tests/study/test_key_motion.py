"""How far one matrix moves the keys is what a forward pass says."""

import csv
import runpy
import sys
from pathlib import Path

import pytest
import torch

from gva import GvaConfig, GvaForCausalLM
from gva.attention import Attention
from gva.diagnostics import observe, unrotated
from train.runs import SIZE

SCRIPT = str(Path(__file__).parents[2] / "studies" / "key_motion.py")


def content_keys(model, text):
    def look(module: Attention, hidden, rotation):
        return unrotated(module, hidden)["k_nope"]

    return observe(model, lambda: model(text, use_cache=False), look)


@pytest.mark.parametrize(("variant", "parts"), [("gqa", ["k_proj"]), ("gva-drope-16", ["key_map", "v_proj"])])
@torch.no_grad()
def test_a_matrix_moves_the_keys_as_far_as_a_forward_pass_says(variant, parts):
    motions = runpy.run_path(SCRIPT)["motions"]
    torch.manual_seed(0)
    # The last layer alone changes, so that every layer's input holds still.
    model = GvaForCausalLM(GvaConfig.preset("demo", variant=variant))
    text = torch.randint(0, model.config.vocab_size, (2, 16))
    last = model.config.num_hidden_layers - 1
    attention = [m for m in model.modules() if isinstance(m, Attention)][last]
    before = {name: p.clone() for name, p in model.named_parameters()}
    old = content_keys(model, text)[last]
    for part in parts:
        weight = getattr(attention, part).weight
        kept = weight.clone()
        weight += 0.01 * torch.randn_like(weight)
        moved = (content_keys(model, text)[last] - old).square().mean().sqrt().item()
        found = {name: (motion, keys) for layer, name, motion, keys, _ in motions(model, text, before) if layer == last}
        assert list(found) == parts
        weight.copy_(kept)
        for name, (motion, keys) in found.items():
            assert keys == pytest.approx(old.square().mean().sqrt().item(), rel=1e-5)
            assert motion == pytest.approx(moved if name == part else 0.0, rel=1e-4, abs=1e-9)
    assert moved > 0


def test_the_table(tmp_path, data, monkeypatch):
    words = ["--data", str(data), "--csv", str(tmp_path / "motion.csv"), "--widths", "128", "--at", "2,5"]
    fields = [word for word in SIZE if not word.startswith("hidden_size")]
    monkeypatch.setattr(sys, "argv", ["key_motion.py", *words, "--stretch", "3", "--device", "cpu", *fields])
    runpy.run_path(SCRIPT, run_name="__main__")
    with (tmp_path / "motion.csv").open() as file:
        rows = list(csv.DictReader(file))
    layers = {row["layer"] for row in rows}
    assert len(rows) == 2 * len(layers) * 3  # stretches, layers, and a matrix of GQA's and two of GVA's
    assert all(float(row["motion"]) > 0 and row["commit"] for row in rows)
