"""A thinned copy of run folders gives the report of the whole ones."""

import json

from gva.cli import main
from gva.run.metrics import read_metrics
from gva.study.archive import archive
from gva.study.results import load
from study.folders import write_run


def test_the_copy_gives_the_same_numbers(tmp_path):
    for seed, (gqa, gva) in enumerate([(3.0, 3.1), (3.2, 3.25), (2.9, 2.95)]):
        write_run(tmp_path / "a", "gqa", seed, gqa)
        write_run(tmp_path / "b", "gva-drope-16", seed, gva)
    write_run(tmp_path / "b", "mla", 0, 3.0, done=False)
    folders, kept = [tmp_path / "a", tmp_path / "b"], tmp_path / "kept"
    assert archive(folders, kept, every=20) == 6
    whole, thin = load(folders), load([kept])
    assert [row.name for row in thin.rows] == [row.name for row in whole.rows]
    for row in thin.rows:
        assert row.valid_loss == whole.row(row.name).valid_loss
    lines = read_metrics(kept / "runs" / "gqa" / "seed-1")
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 20, 40]
    assert sum(line["kind"] == "eval" for line in lines) == 4
    assert not (kept / "runs" / "mla").exists(), "an unfinished run is not kept"
    assert archive(folders, kept, every=20) == 6, "again, over what is there"
    assert archive([kept], kept) == 0


def test_rows_stand_as_their_folders_are_given_and_stay_so(tmp_path):
    """Within a folder as in the matrix, where `write_run` puts GQA before MLA before GVA."""
    for folder, names in {
        "a": ["mla", "gqa"],
        "b": ["gva-drope-16", "gqa"],
        "c": ["gva-baseline", "gva-drope-16"],
    }.items():
        for name in names:
            write_run(tmp_path / folder, name, "abc".index(folder), 3.0)
    kept = tmp_path / "kept"

    def rows(*folders):
        return [row.name for row in load([tmp_path / name for name in folders]).rows]

    assert rows("c", "b", "a") == ["gva-baseline", "gva-drope-16", "gqa", "mla"]
    archive([tmp_path / name for name in "ab"], kept)
    assert rows("kept") == rows("a", "b") == ["gqa", "mla", "gva-drope-16"]
    archive([kept, tmp_path / "c"], kept)
    assert rows("kept") == rows("a", "b", "c") == ["gqa", "mla", "gva-drope-16", "gva-baseline"]


def test_from_the_command_line(tmp_path, capsys):
    write_run(tmp_path / "a", "gqa", 0, 3.0)
    kept = tmp_path / "kept"
    assert main(["report", str(tmp_path / "a"), "--archive", str(kept), "--out", str(tmp_path / "report")]) == 0
    assert f"{kept}: 1 run" in capsys.readouterr().out
    assert json.loads((kept / "runs" / "gqa" / "seed-0" / "run.json").read_text())["identity"]["recipe"]["seed"] == 0
