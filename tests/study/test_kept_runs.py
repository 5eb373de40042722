"""The runs in results/: each in one place, small, and of the matrix that its folder is named for."""

import json
import subprocess
from pathlib import Path

import pytest

from gva.run.metrics import is_done, read_metrics
from gva.study.matrix import read_matrix
from gva.study.reports import read_reports
from gva.train.recipe import FREE

ROOT = Path(__file__).parents[2]
RUNS = sorted(record.parent for record in (ROOT / "results").rglob("run.json"))
BLOCK = 4096


def read(path):
    return json.loads(path.read_text())


def test_a_run_takes_at_most_20_kb():
    for run in RUNS:
        files = {path.name: path.stat().st_size for path in run.iterdir()}
        assert files.keys() == {"run.json", "metrics.jsonl.xz"}, run
        assert sum(files.values()) <= 20_000, run
        assert is_done(run), run


def test_no_run_is_there_twice():
    seen = {}
    for run in RUNS:
        record = read(run / "run.json")
        same = json.dumps([record["identity"], record["versions"]["commit"], read_metrics(run, "eval")], sort_keys=True)
        assert seen.setdefault(same, run) == run, f"{run} is a copy: name it in results/reports.toml instead"


def test_a_row_is_one_of_the_matrix_that_its_folder_names():
    for folder in sorted({run.parent for run in RUNS}):
        study = folder.parent.parent.relative_to(ROOT / "results")
        rows = {row.name: row for row in read_matrix(ROOT / "studies" / f"{study}.toml").rows}
        record = read(folder / "row.json")
        row = rows[record["of"]]
        assert record["variant"] == row.variant, folder
        overrides = {
            name: value for name, value in row.overrides.items() if name not in FREE
        }  # how often one looks, say
        assert overrides.items() <= record["overrides"].items(), folder


def test_every_run_is_reported():
    reported = {record.parent for report in read_reports(ROOT / "results" / "reports.toml").values()
                for folder in report.folders for record in folder.rglob("run.json")}  # fmt: skip
    assert reported == set(RUNS)


def test_a_checkout_takes_at_most_8_mb():
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    folders = {folder for file in files for folder in file.parents if folder.is_relative_to(ROOT)}
    blocks = len(folders) + sum(-(-file.stat().st_size // BLOCK) for file in files)
    assert blocks * BLOCK <= 8_000_000
