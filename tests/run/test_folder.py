"""A run's folder takes one process group, and one run."""

import json
import shutil

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
    (other / "index.json").write_text(json.dumps(index))
    assert "differs in data.valid" in finish(command(other, tmp_path, "--steps", "4"), expect=2)
