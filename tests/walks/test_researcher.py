"""docs/researcher.md, block by block: own text, a model, its curves, two seeds against GQA, an adapter, elsewhere."""

import csv
import re
import shutil

import pytest

pytest.importorskip("peft", reason="needs PEFT: make test")
pytest.importorskip("plotly", reason="needs plotly: make test")

from gva.run.metrics import read_metrics
from walk import Walk


def test_a_researchers_half_hour(tmp_path, monkeypatch, capfd):
    walk = Walk("researcher.md", tmp_path, monkeypatch, capfd)
    walk.take("cat README.md docs/*.md > corpus.txt")

    assert "first/model: trained" in walk.take("gva train --preset demo --data corpus.txt")
    losses = [line["valid_loss"] for line in read_metrics(tmp_path / "first", "eval")]
    assert len(losses) == 4
    assert losses[-1] < losses[0], "it learns"

    looked = walk.take("gva report first")
    assert "report: first/report/index.html" in looked
    assert "The cache" in looked
    assert "bits per byte" in looked
    page = (tmp_path / "first/report/index.html").read_text()
    assert all(f'data-plot="{name}"' in page for name in ("valid-loss", "training-loss"))

    compared = walk.take("gva compare")
    assert "nothing here is ranked" in compared
    with (tmp_path / "study/report/runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert [(run["row"], run["seed"]) for run in runs] == [("gqa", "0"), ("gqa", "1"), ("gva", "0"), ("gva", "1")]
    shown = (tmp_path / "docs/researcher.md").read_text()
    caches = re.search(r"caches (\d+) scalars a token and layer\s+where GQA caches (\d+)", shown).groups()
    assert caches == ("80", "128")

    tuned = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", walk.take("from peft"))]
    assert tuned[-1] < tuned[0] - 0.3, "it learns what it is tuned on"

    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "tuned", tmp_path / "elsewhere")
    assert "gva" not in walk.blocks[0][1], "nothing of ours is imported by hand"
    assert walk.take("from transformers", inside="elsewhere").startswith("Grouped values are")
    assert not walk.blocks
