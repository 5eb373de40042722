"""Two checkpoints on the same items: their difference, and its error."""

import json
import math

import pytest

from gva.cli import main
from gva.evaluate.against import answers, compare, read_answers
from gva.evaluate.tasks import TASKS, Item

ITEMS = [Item([("", "")] * 2, [1, 4], gold) for gold in (0, 1, 0, 1)]
OURS = {"arc_easy": answers(TASKS["arc_easy"], ITEMS, [[-1.0, -2.0], [-1.0, -2.0], [-2.0, -1.0], [-2.0, -1.0]])}
THEIRS = {"arc_easy": answers(TASKS["arc_easy"], ITEMS, [[-2.0, -1.0], [-1.0, -2.0], [-2.0, -1.0], [-2.0, -1.0]])}


def test_the_error_is_that_of_the_difference():
    assert OURS["arc_easy"]["acc"] == "1001"
    assert THEIRS["arc_easy"]["acc"] == "0001"
    found = compare(OURS, THEIRS)
    assert list(found) == ["arc_easy"]
    assert found["arc_easy"]["acc"] == 0.25
    assert found["arc_easy"]["acc_stderr"] == pytest.approx(0.25), "one of four: a deviation of a half, over two"
    assert compare(OURS, OURS)["arc_easy"]["acc_stderr"] == 0


def test_an_average_and_a_task_without_acc_norm():
    pair = {"winogrande": answers(TASKS["winogrande"], ITEMS, [[-1.0, -2.0]] * 4)}
    assert "acc_norm" not in pair["winogrande"]
    found = compare(OURS | pair, THEIRS | pair)
    assert found["winogrande"]["acc_norm"] == found["winogrande"]["acc"] == 0
    assert found["average"]["acc"] == 0.125
    assert found["average"]["acc_stderr"] == pytest.approx(math.hypot(0.25, 0) / 2)


def test_other_items_and_other_tasks_are_refused():
    other = {"arc_easy": answers(TASKS["arc_easy"], ITEMS[:3], [[-1.0, -2.0]] * 3)}
    with pytest.raises(ValueError, match="other items there"):
        compare(OURS, other)
    with pytest.raises(ValueError, match="was not scored there"):
        compare(OURS, {"winogrande": OURS["arc_easy"]})


DAMAGED = [{"acc": "012", "items": "a"}, {"acc": "01"}, "01"]


@pytest.mark.parametrize("content", [[], {}, {"answers": {}}, *({"answers": {"arc_easy": told}} for told in DAMAGED)])
def test_a_file_of_something_else_is_refused(content, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="give a file that gva eval wrote"):
        read_answers(path)


def test_the_command_compares_two_checkpoints(files, trained, tmp_path, capsys):
    words = ["eval", str(trained), "--device", "cpu", "--data-dir", str(files), "--tasks", "arc_easy,winogrande"]
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    assert main([*words, "--out", str(one)]) == 0
    assert main([*words, "--out", str(two), "--against", str(one)]) == 0
    assert "less one.json" in capsys.readouterr().out
    found = json.loads(two.read_text())
    assert found["against"]["average"] == {"acc": 0, "acc_norm": 0, "acc_stderr": 0, "acc_norm_stderr": 0}
    assert len(found["answers"]["arc_easy"]["acc"]) == found["results"]["arc_easy"]["items"]
    assert main([*words, "--engine", "lm-eval", "--against", str(one)]) == 2
