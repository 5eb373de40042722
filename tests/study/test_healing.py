"""Rows that begin from checkpoints and have a teacher, of other widths, over seeds."""

import pytest

from gva.cli import main
from gva.study.results import load
from models import SIZE as WIDTHS
from models import tiny_model
from train.runs import SIZE

MATRIX = """
preset = "demo"
seeds = 2
teacher = "source"

[[row]]
name = "source"
from = "source"

[[row]]
name = "wide"
from = "wide"
"""


@pytest.fixture
def words(tmp_path, data):
    sizes = {"vocab_size": 512, "std": 0.02}
    tiny_model("gqa", **sizes).float().save_pretrained(tmp_path / "models" / "source")
    other = {**WIDTHS, "hidden_size": 48, "value_head_dim": 48, **sizes}
    tiny_model("gva-one-group", **other).float().save_pretrained(tmp_path / "models" / "wide")
    (tmp_path / "matrix.toml").write_text(MATRIX)
    recipe = [
        word for word in SIZE if word.split("=")[0] in ("length", "global_batch", "micro_batch", "eval_sequences")
    ]
    where = ["--data", str(data), "--out", str(tmp_path / "out"), "--device", "cpu", "--steps", "8", "warmup=2"]
    return ["compare", "--matrix", str(tmp_path / "matrix.toml"), "--models", str(tmp_path / "models"), *where, *recipe]


def test_they_are_compared_with_the_teacher_as_a_line(tmp_path, words, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main([*words, "eval_every=4"]) == 0, capsys.readouterr().err
    results = load([tmp_path / "out"])
    assert {row.name: row.seeds for row in results.rows} == {"source": [0, 1], "wide": [0, 1]}
    runs = [run for row in results.rows for run in row.runs]
    first = [run.of_kind("eval")[0] for run in runs]
    assert [line["step"] for line in first] == [0] * 4
    assert first[0]["valid_loss"] == first[1]["valid_loss"], "weights start alike under every seed"
    losses = [[line["loss"] for line in run.of_kind("step")] for run in runs]
    assert losses[0] != losses[1], "the order of the data does not"
    ((name, loss),) = results.references
    assert name == "teacher source"
    assert loss == first[0]["valid_loss"] != first[2]["valid_loss"]
    (note,) = [note for note in results.notes if note.startswith("wide differs")]
    assert "hidden_size 64 → 48" in note
    assert "from" not in note.split("attention:")[1]
    assert "kl_temperature=2.0" in (tmp_path / "out" / "report" / "report.md").read_text()
    tiny_model("gqa", vocab_size=512, seed=3).float().save_pretrained(tmp_path / "models" / "source")
    assert main([*words, "eval_every=4"]) == 2
    assert "; weights.teacher: '" in capsys.readouterr().err


def test_what_is_not_there_is_told_before_anything_runs(tmp_path, words, capsys):
    (tmp_path / "models" / "wide").rename(tmp_path / "models" / "gone")
    assert main(words) == 2
    assert "models/wide: no such checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "out" / "runs").exists()
