"""Tables say what the runs hold, with their uncertainty and no more."""

import csv
import io

import pytest

from gva.report import numbers, tables
from gva.report.curves import DRAWN, curve_rows, task_score
from gva.report.page import markdown
from gva.run.metrics import record
from gva.study.results import load
from gva.study.speed import keep
from gva.study.statistics import Estimate
from study.folders import SPEED, write_run

FIVE = {"hellaswag": 0.40, "winogrande": 0.52, "openbookqa": 0.30, "arc_easy": 0.50, "arc_challenge": 0.28}


@pytest.fixture
def three(tmp_path):
    """GQA, a row within the noise of it and one clearly worse, on three seeds."""
    for seed, base in enumerate((4.0, 4.2, 4.4)):
        write_run(tmp_path, "gqa", seed, base, tasks=FIVE)
        write_run(tmp_path, "mla", seed, base + (0.01, -0.01, 0.002)[seed], tasks=FIVE | {"arc_easy": 0.51})
        write_run(tmp_path, "shared-kv", seed, base + 0.1 + 0.001 * seed, tasks=FIVE | {"hellaswag": 0.35 + seed / 200})
    return load([tmp_path])


def cells(table, name):
    return next(texts for row, seed, texts in table.rows if row == name and not seed)


def test_losses_come_with_spread_interval_and_a_careful_verdict(three):
    table = tables.loss_table(three)
    assert cells(table, "gqa")[3:] == ["4.2000 ± 0.2000", "2.1000 ± 0.1000", "—", "—"]
    # 0.1010 ± 4.3027 * 0.001 / sqrt(3)
    assert cells(table, "shared-kv")[5:] == ["+0.1010 [+0.0985, +0.1035]", "higher"]
    assert cells(table, "mla")[6] == "not told apart"
    assert "the same 4,096 held-out tokens" in table.note


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({0: -0.1}, "one seed: open"),
        ({0: -0.1, 1: -0.1}, "2 seeds: open"),
        ({0: -0.1, 1: -0.101, 2: -0.099}, "lower"),
        ({0: -0.1, 1: 0.2, 2: -0.3}, "not told apart"),
        ({0: -0.1, 1: -0.1, 2: -0.1}, "all seeds alike: open"),
    ],
)
def test_no_winner_inside_the_noise(values, said):
    assert tables.verdict(Estimate(values)) == said


def test_the_accuracy_table_has_the_papers_layout_and_every_seed(three):
    table = tables.accuracy_table(three)
    assert table.header == ["", "HellaSwag", "WinoGrande", "OBQA", "ARC-E", "ARC-C", "Avg.", "against GQA", "at 95%"]
    assert cells(table, "gqa")[1:7] == [f"{x} ± 0.00" for x in ("40.00", "52.00", "30.00", "50.00", "28.00", "40.00")]
    # -0.90 ± 4.3027 * 0.1 / sqrt(3)
    assert cells(table, "shared-kv")[6:] == ["39.10 ± 0.10", "−0.90 [−1.15, −0.65]", "lower"]
    assert cells(table, "mla")[6:] == ["40.20 ± 0.00", "+0.20", "all seeds alike: open"]
    seeds = [texts for row, seed, texts in table.rows if row == "shared-kv" and seed]
    assert [texts[0] for texts in seeds] == ["seed 0", "seed 1", "seed 2"]
    assert [texts[1] for texts in seeds] == ["35.00", "35.50", "36.00"]
    assert "except WinoGrande. Items: 1,000 of each task" in table.note
    assert "Guessing scores 25.00, 50.00, 25.00, 25.00, 25.00; 30.00 on average." in table.note
    assert "Standard errors over items: 1.00, 1.00, 1.00, 1.00, 1.00 at most." in table.note


def test_a_minus_is_a_minus_and_zero_has_no_sign():
    assert [tables.signed(x, 2) for x in (-1.234, 0.001, -0.001, 2.0)] == ["−1.23", "0.00", "0.00", "+2.00"]


def test_costs_are_those_of_the_config(three):
    table = tables.cost_table(three)
    assert cells(table, "gqa")[1:4] == ["128", "1,024", "—"]
    assert cells(table, "shared-kv")[1:4] == ["64", "512", "−50.0%"]
    total, inner = (int(text.replace(",", "")) for text in cells(table, "gqa")[4:])
    assert total - inner == 2048 * 128, "the embedding of the demo preset, which is tied"


def test_too_few_seeds_are_told_on_every_output(tmp_path):
    write_run(tmp_path, "gqa", 0, 4.0)
    write_run(tmp_path, "mla", 0, 4.1)
    one = load([tmp_path])
    for text in (markdown(one), tables.summary_text(one)):
        assert "One toy seed ranks nothing" in text
    write_run(tmp_path, "gqa", 1, 4.0)
    write_run(tmp_path, "mla", 1, 4.1)
    write_run(tmp_path, "mqa", 0, 4.1, done=False)
    assert "Not finished, and left out: mqa:0" in tables.summary_text(load([tmp_path]))
    assert "Two seeds show a spread but give no interval" in markdown(load([tmp_path]))


def test_rows_that_share_too_few_seeds_are_named(tmp_path):
    for seed in range(3):
        write_run(tmp_path, "gqa", seed, 4.0)
        write_run(tmp_path, "mla", seed, 4.1 + 0.001 * seed)
    write_run(tmp_path, "mqa", 0, 4.2)
    said = tables.caution(load([tmp_path]))
    assert said.startswith("Not ranked: MQA, for want of three seeds in common with GQA;")
    for seed in range(3, 6):
        write_run(tmp_path / "other", "gqa", seed, 4.0)
    write_run(tmp_path / "other", "mla", 7, 4.1)
    assert tables.caution(load([tmp_path / "other"])).startswith("Not ranked: MLA, ")
    for row, seeds in (("gqa", 2), ("mla", 1), ("mqa", 2)):
        for seed in range(seeds):
            write_run(tmp_path / "few", row, seed, 4.0)
    said = tables.caution(load([tmp_path / "few"]))
    assert said.startswith("Nothing here is ranked: rows have 1 to 2 seeds in common with GQA."), "not one seed"


def test_what_is_recorded_after_a_run_is_drawn_in_its_place(tmp_path):
    folder = write_run(tmp_path, "gqa", 0, 4.0, tasks=FIVE)
    late = {
        "kind": "tasks",
        "step": 15,
        "tokens": 1,
        "results": {"arc_easy": {"acc": 0.3, "acc_norm": None, "items": 9}},
    }
    record(folder, late)
    (run,) = load([tmp_path]).runs
    assert list(task_score("arc_easy")(run)) == [10, 15, 20, 30, 40]


def test_decode_speed_is_told_where_it_was_measured(tmp_path):
    for name, found in {
        "gqa": SPEED,
        "gva-drope-16": {**SPEED, "tokens_per_second": 1730.0},
        "shared-kv": {**SPEED, "attention": "torch, keys rebuilt", "gpu": "A100"},
        "mha": {"reason": "OutOfMemoryError: CUDA out of memory."},
    }.items():
        keep(write_run(tmp_path, name, 0, 4.0), found)
    results = load([tmp_path])
    table = tables.speed_table(results)
    where = ["0.50", "2 × 256", "triton", "H200"]
    assert cells(table, "gqa") == ["GQA", "1,000", "2.000", "—", *where]
    assert cells(table, "gva-drope-16") == ["GVA + DRoPE 16", "1,730", "2.000", "1.73×", *where]
    assert cells(table, "shared-kv")[3] == "—", "measured on another GPU"
    assert set(cells(table, "mha")[1:]) == {"—"}
    assert "bfloat16; torch 2.11.0. Where keys are rebuilt, " in table.note
    assert table.note.endswith(" MHA not measured: OutOfMemoryError: CUDA out of memory.")
    assert "## Decode speed\n\n|" in markdown(results)
    rows = list(csv.DictReader(io.StringIO(numbers.csv_text(numbers.speed_rows(results)))))
    assert {row["row"]: row["against_baseline"] for row in rows} == {
        "gqa": "1.0", "gva-drope-16": "1.73", "shared-kv": "", "mha": "",
    }  # fmt: skip
    assert [row["reason"] for row in rows if row["reason"]] == ["OutOfMemoryError: CUDA out of memory."]


def test_markdown_tables_are_whole(three):
    text = markdown(three)
    assert "ranks nothing" not in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_the_numbers_are_in_the_csvs(three):
    read = {
        name: list(csv.DictReader(io.StringIO(numbers.csv_text(rows))))
        for name, rows in (
            ("runs", numbers.run_rows(three)),
            ("differences", numbers.difference_rows(three)),
            ("accuracy", numbers.accuracy_rows(three)),
        )
    }
    assert len(read["runs"]) == 9
    assert {row["valid_loss"] for row in read["runs"] if row["row"] == "gqa"} == {"4.0", "4.2", "4.4"}
    (worse,) = [r for r in read["differences"] if r["measure"] == "valid_loss" and r["row"] == "shared-kv"]
    assert float(worse["seed_2"]) == pytest.approx(0.102)
    assert worse["told_apart"] == "True"
    assert len(read["accuracy"]) == 9 * 4 * 5
    drawn = [row for row in curve_rows(three) if row["row"] == "gqa" and row["seed"] == 1]
    assert {row["curve"] for row in drawn} == set(DRAWN)
    assert [row["value"] for row in drawn if row["curve"] == "induction_score"] == pytest.approx([0.25, 0.5, 0.75, 1])
    assert drawn[-1]["tokens"] == 40 * 16 * 128
    assert {r["acc_norm"] for r in read["accuracy"] if r["task"] == "winogrande"} == {""}


def test_a_page_is_filled_between_its_marks_alone():
    page = "text\n<!-- a: begin -->\nold\n<!-- a: end -->\nmore <!-- b: begin --><!-- b: end -->\n"
    filled = tables.fill(page, {"a": "| \\1 |"})
    assert filled == "text\n<!-- a: begin -->\n| \\1 |\n<!-- a: end -->\nmore <!-- b: begin --><!-- b: end -->\n"
    assert tables.fill(filled, {"a": "| \\1 |"}) == filled
    for broken in ("", "<!-- a: begin -->", "<!-- a: end --><!-- a: begin -->", 2 * page):
        with pytest.raises(ValueError, match="needs one"):
            tables.fill(broken, {"a": ""})
