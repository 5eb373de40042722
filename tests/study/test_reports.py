"""A file that names reports: runs that lie in one place stand in several."""

import json

import pytest

from gva.cli import main
from gva.study.reports import read_reports
from study.folders import write_run

LIST = """
[all]
runs = ["b", "a"]

[first-seed]
baseline = "mla"
runs = ["*/runs/*/seed-0"]
"""


@pytest.fixture
def listed(tmp_path):
    for seed, loss in enumerate((3.0, 3.1)):
        write_run(tmp_path / "a", "gqa", seed, loss)
        write_run(tmp_path / "b", "mla", seed, loss)
    path = tmp_path / "reports.toml"
    path.write_text(LIST)
    return path


def test_runs_are_found_from_where_the_file_lies(listed):
    results = {name: report.load() for name, report in read_reports(listed).items()}
    assert [(row.name, row.seeds) for row in results["all"].rows] == [("mla", [0, 1]), ("gqa", [0, 1])]
    assert [(row.name, row.seeds) for row in results["first-seed"].rows] == [("gqa", [0]), ("mla", [0])]
    assert [results[name].baseline for name in results] == ["gqa", "mla"]


def test_words_for_the_data_replace_what_the_runs_recorded(listed):
    run = next(listed.parent.glob("a/runs/gqa/seed-0/run.json"))
    run.write_text(json.dumps(json.loads(run.read_text()) | {"data": "recorded"}))
    (report,) = [report for name, report in read_reports(listed).items() if name == "all"]
    assert report.load().data == "recorded"
    listed.write_text(f'data = "prose"\n{LIST}')
    assert [report.load().data for report in read_reports(listed).values()] == ["prose", "prose"]
    listed.write_text(f"data = 3\n{LIST}")
    with pytest.raises(ValueError, match="data=3: "):
        read_reports(listed)


def test_one_command_writes_all_of_them(listed, capsys):
    assert main(["report", str(listed)]) == 0
    folder = listed.with_suffix("")
    told = capsys.readouterr().out
    for name in ("all", "first-seed"):
        assert (folder / name / "report.md").is_file()
        assert f"report: {folder / name}" in told
    assert main(["report", str(listed), "--out", str(listed.parent / "elsewhere")]) == 0
    assert (listed.parent / "elsewhere" / "all" / "runs.csv").is_file()


@pytest.mark.parametrize("words", [["--baseline", "gqa"], ["--archive", "kept"], ["a"]])
def test_what_the_file_says_is_not_said_again(listed, words, monkeypatch, capsys):
    monkeypatch.chdir(listed.parent)
    assert main(["report", listed.name, *words]) == 2
    assert words[-1] in capsys.readouterr().err
    assert not listed.with_suffix("").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "names no report"),
        ("[a]\nbaseline = 'gqa'", "needs a table .a. with runs"),
        ("a = 1", "needs a table .a. with runs"),
        ("[a]\nruns = ['a']\nseeds = 3", "needs a table .a. with runs"),
        ("[a]\nruns = ['c']", "runs='c': nothing like it beside .*mend the report a"),
        ("[a", "not readable"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(listed, text, told):
    listed.write_text(text)
    with pytest.raises(ValueError, match=told):
        read_reports(listed)
