"""A thinned copy of run folders gives the report of the whole ones."""

import json
import os

import pytest

from gva.cli import main
from gva.report.curves import induction
from gva.run.files import FolderError
from gva.run.metrics import read_metrics, record
from gva.study.archive import archive
from gva.study.results import load
from study.folders import write_run


def test_the_copy_gives_the_same_numbers(tmp_path):
    for seed, (gqa, gva) in enumerate([(3.0, 3.1), (3.2, 3.25), (2.9, 2.95)]):
        write_run(tmp_path / "a", "gqa", seed, gqa)
        write_run(tmp_path / "b", "gva-drope-16", seed, gva)
    write_run(tmp_path / "b", "mla", 0, 3.0, done=False)
    folders, kept = [tmp_path / "a", tmp_path / "b"], tmp_path / "kept"
    assert archive(folders, kept, steps=2) == 6
    whole, thin = load(folders), load([kept])
    assert [row.name for row in thin.rows] == [row.name for row in whole.rows]
    for row in thin.rows:
        assert row.valid_loss == whole.row(row.name).valid_loss
    lines = read_metrics(kept / "runs" / "gqa" / "seed-1")
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 20, 40]
    evaluated = read_metrics(tmp_path / "a" / "runs" / "gqa" / "seed-1", "eval")
    assert [line for line in lines if line["kind"] == "eval"] == evaluated
    assert [induction(run) for run in thin.runs] == [induction(run) for run in whole.runs]
    assert lines[-1]["kind"] == "done"
    assert not (kept / "runs" / "mla").exists(), "an unfinished run is not kept"
    assert archive(folders, kept, steps=2) == 6, "again, over what is there"
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


def test_metrics_are_compressed_and_logged_numbers_rounded(tmp_path):
    """What is drawn, not what is compared; and a line that is recorded later goes into the compressed file."""
    whole = write_run(tmp_path / "a", "gqa", 0, 3.123456789, steps=4000)
    archive([tmp_path / "a"], tmp_path / "kept")
    kept = tmp_path / "kept" / "runs" / "gqa" / "seed-0"
    assert sorted(path.name for path in kept.iterdir()) == ["metrics.jsonl.xz", "run.json"]
    assert (kept / "metrics.jsonl.xz").stat().st_size < 0.02 * (whole / "metrics.jsonl").stat().st_size
    steps = read_metrics(kept, "step")
    assert [line["step"] for line in steps] == [1, *range(40, 4001, 40)]
    assert all(line["loss"] == float(f"{line['loss']:.5g}") for line in steps)
    before = read_metrics(kept)
    record(kept, {"kind": "decode", "step": 4000, "tokens_per_second": 1.0})
    assert read_metrics(kept) == [*before, {"kind": "decode", "step": 4000, "tokens_per_second": 1.0}]
    assert not (kept / "metrics.jsonl").exists()


def test_another_run_of_the_same_name_stays(tmp_path):
    """Trained in another way, or in the same with another outcome; nothing of the command is written then."""
    write_run(tmp_path / "a", "gqa", 0, 3.0)
    kept = tmp_path / "kept"
    archive([tmp_path / "a"], kept)
    before = {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    for name, loss, fields in (("b", 3.0, {"lr": 2e-3}), ("c", 3.1, {})):
        write_run(tmp_path / name, "gva-drope-16", 0, 3.0)
        write_run(tmp_path / name, "gqa", 0, loss, fields=fields)
        with pytest.raises(ValueError, match="gqa/seed-0: another run than"):
            archive([tmp_path / name], kept)
    assert {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("left", range(3))  # of the row, the metrics and the record
def test_a_kill_between_two_files_of_a_run_is_gone_on_from(tmp_path, monkeypatch, left):
    write_run(tmp_path / "a", "gqa", 0, 3.0)
    archive([tmp_path / "a"], tmp_path / "whole")
    real, written = os.replace, []

    def killed(source, target):
        if len(written) == left:
            raise KeyboardInterrupt
        written.append(target)
        real(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        archive([tmp_path / "a"], tmp_path / "kept")
    monkeypatch.undo()
    assert archive([tmp_path / "a"], tmp_path / "kept") == 1
    both = [{p.name: p.read_bytes() for p in (tmp_path / name).rglob("*.*")} for name in ("kept", "whole")]
    assert both[0] == both[1]


def test_another_seed_that_was_trained_in_another_way_is_refused(tmp_path):
    """Two studies have a row called gqa: their seeds side by side would be a comparison of nothing."""
    write_run(tmp_path / "a", "gqa", 0, 3.0)
    write_run(tmp_path / "b", "gqa", 1, 3.0, fields={"lr": 2e-3})
    kept = tmp_path / "kept"
    archive([tmp_path / "a"], kept)
    with pytest.raises(ValueError, match=r"gqa/seed-0: .*seed-1 is no other seed of it but differs in recipe.lr"):
        archive([tmp_path / "b"], kept)
    with pytest.raises(ValueError, match="is no other seed of it"):
        archive([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert not (kept / "runs" / "gqa" / "seed-1").exists()
    assert not (tmp_path / "both").exists()


@pytest.mark.parametrize(("file", "field", "value"), [
    ("row.json", "name", "../../x"), ("row.json", "name", "/tmp/x"), ("row.json", "name", ["x"]),
    ("run.json", "seed", "../x"), ("run.json", "seed", 1.5), ("run.json", "seed", None),
    ("row.json", "name", "a/b"), ("row.json", "order", "first"), ("row.json", "overrides", [1]),
])  # fmt: skip
def test_a_name_or_seed_of_a_stranger_leads_nowhere(tmp_path, capsys, file, field, value):
    run = write_run(tmp_path / "a", "gqa", 0, 3.0)
    path = run / file if file == "run.json" else run.parent / file
    record = json.loads(path.read_text())
    (record["identity"]["recipe"] if file == "run.json" else record)[field] = value
    path.write_text(json.dumps(record))
    before = sorted(tmp_path.rglob("*"))
    words = ["--archive", str(tmp_path / "kept"), "--out", str(tmp_path / "report")]
    assert main(["report", str(tmp_path / "a"), *words]) == 2
    assert f"{file}" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_in_the_archive_is_not_followed(tmp_path):
    write_run(tmp_path / "a", "gqa", 0, 3.0)
    kept, elsewhere = tmp_path / "kept", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (kept / "runs").mkdir(parents=True)
    (kept / "runs" / "gqa").symlink_to(elsewhere)
    with pytest.raises(FolderError, match="a link to"):
        archive([tmp_path / "a"], kept)
    assert not list(elsewhere.iterdir())


def test_a_folder_of_tasks_is_kept_by_its_name(tmp_path):
    run = write_run(tmp_path / "a", "gqa", 0, 3.0, fields={"tasks_every": 10, "tasks_data": "/home/me/five-tasks/"})
    records = [path.read_text() for path in (run / "run.json", run.parent / "row.json")]
    assert all("/home/me/five-tasks" in text for text in records)
    kept = tmp_path / "kept"
    archive([tmp_path / "a"], kept)
    records = [path.read_text() for path in kept.rglob("*.json")]
    assert len(records) == 2
    assert all("/home/me" not in text and '"tasks_data": "five-tasks"' in text for text in records)


def test_from_the_command_line(tmp_path, capsys):
    write_run(tmp_path / "a", "gqa", 0, 3.0)
    kept = tmp_path / "kept"
    assert main(["report", str(tmp_path / "a"), "--archive", str(kept), "--out", str(tmp_path / "report")]) == 0
    assert f"{kept}: 1 run" in capsys.readouterr().out
    assert json.loads((kept / "runs" / "gqa" / "seed-0" / "run.json").read_text())["identity"]["recipe"]["seed"] == 0
