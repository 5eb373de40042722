"""Runs read back: merged over machines, refused where they do not compare, the best rate chosen."""

import json
import re
import shutil
from pathlib import Path

import pytest

from gva.report import write_report
from gva.run.metrics import read_metrics, record
from gva.study.results import NotComparable, load
from study.folders import DATA, SPEED, write_run


def test_differences_are_paired_by_seed(tmp_path):
    for seed, base in enumerate((4.0, 4.5, 5.0)):
        write_run(tmp_path, "gqa", seed, base)
        write_run(tmp_path, "gva-drope-16", seed, base + 0.02 + 0.001 * seed)
    results = load([tmp_path])
    assert results.baseline == "gqa"
    difference = results.against_baseline(results.row("gva-drope-16"), lambda run: run.valid_loss)
    assert difference.mean == pytest.approx(0.021)
    assert difference.told_apart
    assert results.against_baseline(results.row("gqa"), lambda run: run.valid_loss) is None
    assert results.notes == []


def test_folders_of_several_machines_become_one_comparison(tmp_path):
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    write_run(a, "gqa", 0, 4.0)
    write_run(b, "gqa", 1, 4.1, versions={"torch": "2.11.0"})
    write_run(b, "mla", 0, 4.2, done=False)
    shutil.copytree(a, c)  # the same run twice is one run
    results = load([a, b, c])
    assert [(row.name, row.seeds) for row in results.rows] == [("gqa", [0, 1])]
    assert results.unfinished == ["mla:0"]
    assert any("different versions of torch: 2.11.0, 2.13.0" in note for note in results.notes)
    assert any("Not finished, and left out: mla:0" in note for note in results.notes)


def test_another_run_under_the_same_name_is_refused(tmp_path):
    write_run(tmp_path / "a", "gqa", 0, 4.0)
    write_run(tmp_path / "b", "gqa", 0, 4.3)
    with pytest.raises(NotComparable, match="are both gqa seed 0, and differ"):
        load([tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"data": {**DATA, "train": "another"}}, "different train data .*not a comparison"),
        ({"data": {**DATA, "valid": "another"}}, "different valid data .*not a comparison"),
        ({"valid_tokens": 2048}, "validated on 4,096 tokens and .* on 2,048"),
    ],
)
def test_runs_on_different_data_are_refused(tmp_path, other, message):
    write_run(tmp_path, "gqa", 0, 4.0)
    write_run(tmp_path, "mla", 0, 4.0, **other)
    with pytest.raises(NotComparable, match=message):
        load([tmp_path])


def test_one_row_trained_in_two_ways_is_refused(tmp_path):
    write_run(tmp_path / "a", "gqa", 0, 4.0)
    write_run(tmp_path / "b", "gqa", 1, 4.0, fields={"weight_decay": 0.2})
    with pytest.raises(NotComparable, match=r"both called gqa but differ in recipe.weight_decay"):
        load([tmp_path / "a", tmp_path / "b"])


def test_rows_that_differ_in_more_than_attention_say_so(tmp_path):
    write_run(tmp_path, "gqa", 0, 4.0)
    write_run(tmp_path, "mla", 0, 4.0)
    write_run(tmp_path, "mha", 0, 4.0)
    write_run(tmp_path, "gqa-one", 0, 4.0, variant="gqa", fields={"num_value_groups": 1, "lr": 0.01}, steps=80)
    (note,) = load([tmp_path]).notes
    assert note.startswith("gqa-one differs from gqa in more than the attention: ")
    for part in ("steps 40 → 80", "lr 0.003 → 0.01", "num_value_groups 2 → 1"):
        assert part in note


def test_the_best_rate_is_chosen_by_mean_loss(tmp_path):
    losses = {1e-3: (4.2, 4.0), 2e-3: (4.0, 4.1), 4e-3: (3.9, 4.4)}
    for rate, found in losses.items():
        for seed, loss in enumerate(found):
            write_run(tmp_path, f"gqa-lr{rate:g}", seed, loss, variant="gqa", fields={"lr": rate}, of="gqa")
            write_run(tmp_path, f"mla-lr{rate:g}", seed, 5 + rate, variant="mla", fields={"lr": rate}, of="mla")
    results = load([tmp_path])
    assert [(row.name, row.lr) for row in results.rows] == [("gqa", 2e-3), ("mla", 1e-3)]
    assert [(rate.row, rate.lr) for rate in results.rates if rate.chosen] == [("gqa", 2e-3), ("mla", 1e-3)]
    assert len(results.rates) == 6
    assert [note for note in results.notes if "edge of its sweep" in note] == [
        "mla did best at the edge of its sweep (0.001): widen it that way."
    ]
    assert not any("more luck" in note for note in results.notes)
    write_run(tmp_path, "mqa", 0, 4.1)
    (told,) = (note for note in load([tmp_path]).notes if "more luck" in note)
    assert "(mqa 1, gqa 3, mla 3)" in told


def sweep(folder, losses):
    for rate, found in losses.items():
        for seed, loss in found.items():
            write_run(folder, f"gqa-lr{rate:g}", seed, loss, variant="gqa", fields={"lr": rate}, of="gqa")
    return load([folder])


def test_a_rate_with_a_missing_seed_is_not_chosen(tmp_path):
    results = sweep(tmp_path / "two", {1e-3: {0: 4.2, 1: 4.0}, 2e-3: {0: 3.0}})
    assert results.row("gqa").lr == 1e-3
    assert any("fewer seeds" in note for note in results.notes)
    results = sweep(tmp_path / "three", {1e-3: {0: 4.2, 1: 4.0}, 2e-3: {0: 4.3, 1: 4.3}, 4e-3: {0: 3.0}})
    assert results.row("gqa").lr == 1e-3
    assert results.notes == ["gqa: some rates have fewer seeds than others and could not be chosen."]


def test_more_seeds_at_one_rate_are_compared_and_do_not_choose_it(tmp_path):
    four = {0: 4.1, 1: 4.1, 2: 3.0, 3: 3.0}
    two = {0: 4.2, 1: 4.2}
    results = sweep(tmp_path, {5e-4: two, 1e-3: two, 2e-3: {0: 4.0, 1: 4.0, 2: 4.4}, 4e-3: four})
    assert results.row("gqa").lr == 2e-3
    assert results.row("gqa").seeds == [0, 1, 2]
    assert results.notes == ["gqa: its rate was chosen on the seeds that most of its rates have (0, 1)."]


@pytest.mark.parametrize(
    "losses",
    [
        {1e-3: {0: 3.0}, 2e-3: {1: 4.0, 2: 4.0}, 4e-3: {3: 3.0}},
        {1e-3: {0: 3.0, 1: 3.0}, 2e-3: {1: 4.0, 2: 4.0, 3: 4.0}, 4e-3: {0: 3.0, 2: 3.0}},
        {1e-3: {0: 3.0}, 2e-3: {1: 4.0, 2: 4.0}},
    ],
    ids=["none shared", "none has all the usual ones", "two, none shared"],
)
def test_where_no_rate_has_the_usual_seeds_the_fullest_is_taken(tmp_path, losses):
    assert sweep(tmp_path, losses).row("gqa").lr == 2e-3


def test_the_average_is_over_the_tasks_that_all_rows_have(tmp_path):
    five = {"hellaswag": 0.4, "winogrande": 0.52, "openbookqa": 0.3, "arc_easy": 0.5, "arc_challenge": 0.28}
    write_run(tmp_path, "gqa", 0, 4.0, tasks=five)
    write_run(tmp_path, "mla", 0, 4.0, tasks={k: v for k, v in five.items() if k != "arc_easy"})
    results = load([tmp_path])
    assert results.tasks() == ["hellaswag", "winogrande", "openbookqa", "arc_challenge"]
    assert results.average(results.row("gqa").runs[0]) == pytest.approx((0.4 + 0.52 + 0.3 + 0.28) / 4)


def test_accuracies_on_other_items_are_left_out_and_told(tmp_path):
    """How many items are scored may change when a run goes on, so that rows may differ in it."""
    two = {"hellaswag": 0.4, "arc_easy": 0.5}
    write_run(tmp_path, "gqa", 0, 4.0, tasks=two)
    folder = write_run(tmp_path, "mla", 0, 4.0, tasks=two)
    write_run(tmp_path, "mqa", 0, 4.0, tasks={**two, "winogrande": 0.5})
    assert load([tmp_path]).notes == ["WinoGrande was scored for some rows only, and is left out."]
    lines = read_metrics(folder)
    last = [line for line in lines if line["kind"] == "tasks"][-1]
    lines[0:0] = [json.loads(json.dumps({**last, "step": 1}))]
    lines[0]["results"]["hellaswag"]["items"] = last["results"]["arc_easy"]["items"] = 50
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = load([tmp_path])
    assert results.tasks() == ["hellaswag"]
    assert results.average(results.row("gqa").runs[0]) == pytest.approx(0.4)
    assert results.notes[:2] == [
        "ARC-E was scored on different numbers of items (50, 1,000), and is left out.",
        "HellaSwag was scored on 1,000 items at the end, on others along the way.",
    ]


def test_what_is_no_comparison_is_told(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        load([tmp_path / "nowhere"])
    with pytest.raises(NotComparable, match="no finished run"):
        load([tmp_path])
    write_run(tmp_path, "gqa", 0, 4.0)
    with pytest.raises(ValueError, match=r"no finished run of it, only of \['gqa'\]"):
        load([tmp_path], "mla")


def test_a_part_of_a_comparison_is_taken_against_what_it_has(tmp_path):
    write_run(tmp_path, "mla", 0, 4.0)
    write_run(tmp_path, "shared-kv", 0, 4.1)
    results = load([tmp_path], "gqa", needed=False)
    assert results.baseline == "mla"
    assert results.notes == ["There is no finished run of gqa here: differences are taken against mla."]


def test_of_two_copies_of_a_run_the_one_scored_since_is_taken(tmp_path):
    folder = write_run(tmp_path / "a", "gqa", 0, 4.0)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    scored = {"arc_easy": {"acc": 0.3, "acc_norm": 0.4, "items": 9}}
    record(folder, {"kind": "tasks", "step": 40, "tokens": 1, "results": scored})
    for order in ("ab", "ba"):
        assert load([tmp_path / name for name in order]).tasks() == ["arc_easy"]


def test_a_run_is_called_by_its_folder_from_inside_too(tmp_path, monkeypatch):
    folder = write_run(tmp_path, "gqa", 0, 4.0).rename(tmp_path / "mine")
    monkeypatch.chdir(folder)
    assert [row.name for row in load([Path()]).rows] == ["mine"]


def spoiled(run, kind, change, step=None):
    """The run with a change to its lines of a kind, or to that of a step."""
    lines = read_metrics(run)
    for line in lines:
        if line["kind"] == kind and step in (None, line["step"]):
            change(line)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


NAN = float("nan")


def change_evals(step=None, **fields):
    return lambda run: spoiled(run, "eval", lambda line: line.update(fields), step)


@pytest.mark.parametrize(("spoil", "why"), [
    (change_evals(valid_loss=NAN), "its validation loss is not a number"),
    (change_evals(20, valid_loss=NAN), "its validation loss is not a number"),
    (change_evals(loss_by_position=[1.0, NAN]), "its validation loss is not a number"),
    (change_evals(valid_loss="3"), "its validation loss is not a number"),
    (change_evals(40, kind="?"), "the validation loss at its end is lost"),
    (change_evals(kind="?"), "there is no validation loss"),
])  # fmt: skip
def test_a_run_without_a_number_at_its_end_is_no_row(tmp_path, spoil, why):
    """Not an earlier number in its place either."""
    write_run(tmp_path, "gqa", 0, 4.0)
    spoil(write_run(tmp_path, "mla", 0, 4.1))
    spoil(write_run(tmp_path, "gqa", 1, 4.1))
    results = load([tmp_path])
    assert [(row.name, row.seeds) for row in results.rows] == [("gqa", [0])]
    told = " ".join(results.notes)
    assert f"gqa:1 is left out: {why}" in told
    assert f"mla:0 is left out: {why}" in told
    shutil.rmtree(tmp_path / "runs" / "gqa" / "seed-0")
    with pytest.raises(NotComparable, match=f"no finished run; gqa:1 is left out: {why}"):
        load([tmp_path])


@pytest.mark.parametrize(("kind", "change"), [
    ("step", lambda line: line.update(loss=NAN)), ("step", lambda line: line.update(loss="<b>")),
    ("diagnostics", lambda line: line["qk_scales"][0].update(k_nope=float("inf"))),
    ("diagnostics", lambda line: line.pop("previous_token_attention")),
    ("tasks", lambda line: line["results"]["arc_easy"].update(acc_norm=NAN)),
    ("tasks", lambda line: line.update(results={"arc_easy": 3})),
    ("tasks", lambda line: line["results"]["arc_easy"].update(acc_stderr="<b>")),
    ("decode", lambda line: line.pop("step_ms")), ("decode", lambda line: line.update(tokens_per_second=0)),
    ("decode", lambda line: line.update(gpu=["H200"])), ("decode", lambda line: line.update(reason=3)),
])  # fmt: skip
def test_a_line_that_is_not_of_numbers_costs_itself_and_says_so(tmp_path, kind, change):
    write_run(tmp_path, "gqa", 0, 4.0)
    spoilt = write_run(tmp_path, "mla", 0, 4.1, tasks={"arc_easy": 0.4})
    record(spoilt, {"kind": "decode", "step": 40, **SPEED})
    spoiled(spoilt, kind, change, 40)
    results = load([tmp_path])
    assert results.row("mla").valid_loss.mean == pytest.approx(4.1)
    assert results.row("mla").runs[0].tasks == ({} if kind == "tasks" else results.row("mla").runs[0].tasks)
    assert f"mla:0: lines of its metrics ({kind}) are damaged, and left out." in results.notes
    write_report(results, tmp_path / "report")
    assert not re.search(r"\bnan\b|\binf\b", (tmp_path / "report" / "curves.csv").read_text())


def test_accuracies_over_one_item_have_no_error_and_a_report(tmp_path):
    for name in ("gqa", "mla"):
        run = write_run(tmp_path, name, 0, 4.0, tasks={"arc_easy": 1.0}, items=1)
        spoiled(run, "tasks", lambda line: line["results"]["arc_easy"].update(acc_stderr=None, acc_norm_stderr=None))
    results = load([tmp_path])
    assert results.tasks() == ["arc_easy"]
    write_report(results, tmp_path / "report")
    assert "Standard errors" not in (tmp_path / "report" / "report.md").read_text()
