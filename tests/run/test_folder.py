"""A run's folder takes one process group, and one run."""

import json
import shutil

import pytest

from gva.data.shards import sum_of_index
from gva.run.folder import RUN, refuse_foreign
from train.runs import command, finish, kill_when


def test_two_runs_in_one_folder_are_refused(tmp_path, data):
    run = command(data, tmp_path, "--steps", "100000")
    told = []

    def second():
        if (tmp_path / "metrics.jsonl").is_file():
            told.append(finish(run, expect=2))
        return bool(told)

    assert kill_when(run, second)
    assert "another process is training here; stop it, or give another --out" in told[0]


def test_another_run_is_refused_by_what_differs(tmp_path, data):
    finish(command(data, tmp_path, "--steps", "4"))
    told = finish(command(data, tmp_path, "--steps", "4", "lr=0.5", "--seed", "3"), expect=2)
    assert "holds a run that differs in recipe.lr: 0.003 -> 0.5; recipe.seed: 0 -> 3" in told
    told = finish(command(data, tmp_path, "--steps", "4", variant="gqa"), expect=2)
    assert "model.attention: 'gva' -> 'gqa'" in told
    other = shutil.copytree(data, tmp_path / "other")
    index = json.loads((other / "index.json").read_text())
    index["splits"]["valid"][0]["sha256"] = "another"
    (other / "index.json").write_text(json.dumps({**index, "sha256": sum_of_index(index)}))
    assert "differs in data.valid" in finish(command(other, tmp_path, "--steps", "4"), expect=2)


@pytest.mark.parametrize(
    "left",
    [(), (".lock",), ("data/index.json",), ("gqa/.row.json.7.tmp",), ("gqa/row.json", "notes.txt"), (RUN, "notes.txt")],
)
def test_what_was_begun_here_goes_on(tmp_path, left):
    """New, empty, or as a kill may have left it; notes beside a run are its owner's."""
    for name in left:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    refuse_foreign(tmp_path, "run.json" if RUN in left else "*/row.json")
    refuse_foreign(tmp_path / "new")


@pytest.mark.parametrize("left", [("thesis.tex",), ("photos/1.jpg", "data/index.json"), ("photos/row/row.json",)])
def test_a_folder_of_other_files_is_refused(tmp_path, left):
    for name in left:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("")
    for marks in (RUN, "*/row.json"):
        with pytest.raises(FileExistsError, match=r"a folder of other files .*; give another --out"):
            refuse_foreign(tmp_path, marks)
