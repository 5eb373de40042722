"""Items: their text, the files they come from, and what is said of files that hold none."""

import gzip
import json
import lzma

import pytest

from gva.data.documents import DataError
from gva.evaluate.tasks import TASKS, chosen_tasks, items_of, load_rows
from task_rows import ARC, FILES, HELLASWAG, OPENBOOKQA, WINOGRANDE


def item(name, row):
    return items_of(TASKS[name], [row])[0]


def test_the_text_of_hellaswag_has_no_markup():
    found = item("hellaswag", HELLASWAG[1])
    assert found.pairs[0] == (
        "Home and Garden:  How to prune a rose. Wait for spring. In".replace("  ", " "),
        " March, when buds swell. Cut above a bud.",
    )
    assert found.gold == 0
    assert found.lengths[1] == len("a week.")
    assert item("hellaswag", HELLASWAG[0]).pairs[3][0] == "Roof repair: A man sits on a roof. He"
    assert item("hellaswag", HELLASWAG[2]).pairs[0][0].endswith(". "), "a space is left where markup ended the context"


def test_winogrande_scores_one_ending_after_two_names():
    found = item("winogrande", WINOGRANDE[0])
    assert found.pairs == [
        ("Sarah was a better surgeon than Maria so Sarah", " got the easier cases."),
        ("Sarah was a better surgeon than Maria so Maria", " got the easier cases."),
    ]
    assert found.gold == 1


def test_the_text_of_openbookqa_and_arc():
    found = item("openbookqa", OPENBOOKQA[0])
    assert found.pairs[1] == ("There is most likely going to be fog around: ", " a tundra")
    assert item("openbookqa", OPENBOOKQA[1]).gold == 2
    found = item("arc_easy", ARC[0])
    assert found.pairs[2] == ('Question: Which is the "hottest"?\n(Pick one.)\nAnswer:', " steam")
    assert (found.gold, found.lengths) == (2, [3, 5, 5])


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
@pytest.mark.parametrize("stem", ["arc_easy_test", "arc_easy"])
def test_files_are_found_under_both_names_and_decompressed(tmp_path, suffix, pack, stem):
    lines = "".join(json.dumps(row) + "\n" for row in FILES["arc_easy"])
    (tmp_path / f"{stem}.jsonl{suffix}").write_bytes(pack(lines.encode()))
    rows = load_rows(TASKS["arc_easy"], tmp_path)
    assert rows[:3] == ARC
    assert rows[3]["choices"] == {"text": ["rain", "smoke", "steam"], "label": ["A", "B", "C"]}
    assert [i.gold for i in items_of(TASKS["arc_easy"], rows)] == [2, 1, 0, 0, 1]
    assert load_rows(TASKS["arc_easy"], tmp_path, limit=2) == ARC[:2]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({**ARC[0], "answerKey": "9"}, r"line 2: not an item of arc_easy \(ValueError"),
        ({"question": "?", "choices": ["a", "b"], "label": 2}, "line 2: not an item of arc_easy"),
        ({"text": "prose"}, r"line 2: not an item of arc_easy \(KeyError\('choices'\); it has \['text'\]\)"),
        ([1], "line 2 is a list"),
    ],
)
def test_a_line_that_is_no_item_is_told_by_its_number(tmp_path, row, told):
    (tmp_path / "arc_easy.jsonl").write_text(json.dumps(ARC[0]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"arc_easy.jsonl: {told}"):
        load_rows(TASKS["arc_easy"], tmp_path)


def test_an_answer_that_is_no_choice_is_told():
    with pytest.raises(DataError, match="row 1: its answer is number 4 of 4 choices"):
        item("hellaswag", {**HELLASWAG[0], "label": 4})


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no file for hellaswag; expected hellaswag_val.jsonl or hellaswag.jsonl"):
        load_rows(TASKS["hellaswag"], tmp_path)
    (tmp_path / "hellaswag.jsonl").write_text("")
    with pytest.raises(DataError, match="hellaswag: no items in"):
        load_rows(TASKS["hellaswag"], tmp_path)


def test_a_list_of_tasks():
    assert [task.name for task in chosen_tasks("paper")] == list(TASKS)
    assert [task.name for task in chosen_tasks("winogrande, arc_easy,winogrande")] == ["winogrande", "arc_easy"]
    assert [task.name for task in chosen_tasks("arc_easy,paper")] == ["arc_easy", *list(TASKS)[:3], "arc_challenge"]
    with pytest.raises(ValueError, match="did you mean 'hellaswag'"):
        chosen_tasks("arc_easy,helaswag")


def test_without_a_folder_rows_come_from_the_hub(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(path, name, split):
        asked.append((path, name, split))
        return iter(ARC)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_rows(TASKS["arc_challenge"], None, limit=2) == ARC[:2]
    assert asked == [("allenai/ai2_arc", "ARC-Challenge", "test")]


def test_a_hub_that_cannot_be_reached_is_told(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"could not be fetched \(Couldn't reach.*give local files with --data-dir"):
        load_rows(TASKS["hellaswag"], None)
