"""The page as text: self-contained, only panels that have data, honest about seeds; test_browser.py looks at it."""

import json
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from gva.cli import main
from gva.report import write_report
from gva.report.page import plotly_script
from gva.report.panels import decode_speed, shared_kv, valid_loss
from gva.report.style import styles
from gva.study.results import load
from gva.study.speed import keep
from study.folders import SPEED, write_run

pytest.importorskip("plotly", reason="plotly draws the page: pip install 'grouped-value-attention[report]'")

FIVE = {"hellaswag": 0.40, "winogrande": 0.52, "openbookqa": 0.30, "arc_easy": 0.50, "arc_challenge": 0.28}
DECODE = Path(__file__).parents[2] / "benchmarks" / "results" / "decode.csv"
ALWAYS = ["valid-loss", "training-loss", "gap", "loss-forest", "pareto", "in-context", "induction", "previous-token",
          "key-scale", "key-scale-layers", "positions"]  # fmt: skip


def panels(html):
    return re.findall(r'data-plot="([\w-]+)"', html)


def read(folder):
    return (folder / "index.html").read_text()


@pytest.fixture
def full(tmp_path):
    """Everything a report can show: tasks, a sweep, shared KV, three seeds."""
    for seed in range(3):
        for rate in (1e-3, 2e-3, 4e-3):
            fields = {"lr": rate}
            for name, loss in (("gqa", 4.0), ("shared-kv", 4.1), ("gva-drope-16", 4.01)):
                tasks = {task: value - loss / 100 * (1 + seed / 50) for task, value in FIVE.items()}
                lost = loss * (1 + seed / 400) + abs(rate - 2e-3)
                write_run(tmp_path, f"{name}-lr{rate:g}", seed, lost, variant=name, fields=fields, of=name, tasks=tasks)
    return tmp_path


def test_panels_without_data_are_absent(tmp_path):
    write_run(tmp_path, "gqa", 0, 4.0)
    write_run(tmp_path, "gva-drope-16", 0, 4.1)
    assert main(["report", str(tmp_path)]) == 0
    html = read(tmp_path / "report")
    assert panels(html) == ALWAYS
    assert "One toy seed ranks nothing" in html
    for absent in ("HellaSwag", "Decode speed", "Learning rates", "95% interval ["):
        assert absent not in html
    assert not (tmp_path / "report" / "accuracy.csv").exists()


def words(html):
    """What a reader sees without the plots."""
    return re.sub(r"<script.*?</script>|<style.*?</style>", "", html, flags=re.S)


def test_a_page_of_one_seed_speaks_of_no_deviations(tmp_path):
    for name in ("gqa", "gva-drope-16", "mla"):
        write_run(tmp_path, name, 0, 4.0, tasks=FIVE)
    assert main(["report", str(tmp_path)]) == 0
    for absent in ("deviation", "Student", "95%", "Thin lines", "±"):
        assert absent not in words(read(tmp_path / "report"))
        assert absent not in (tmp_path / "report" / "report.md").read_text()
    assert "gqa (seed 0)" in words(read(tmp_path / "report"))


def test_a_run_alone_has_its_curves_and_says_what_it_is(tmp_path):
    write_run(tmp_path, "gva-drope-16", 0, 4.0, fields={"warmup": 7})
    assert main(["report", str(tmp_path)]) == 0
    html = read(tmp_path / "report")
    assert panels(html)[:2] == ["valid-loss", "training-loss"]
    plot = json.loads(re.search(r'id="data">(.*?)</script>', html, flags=re.S)[1])["plots"]["valid-loss"]
    (line,) = plot["figure"]["data"]
    assert line["x"] == [step * 16 * 128 for step in (10, 20, 30, 40)]
    assert line["y"][-1] == 4.0
    told = words(html)
    assert "against" not in told.partition("Why the initial scale")[0]
    for said in (
        "4.000</strong>",
        "4 layers, 128 wide",
        "a linear warm-up over 7 steps",
        "Fingerprints: train 0123456789",
    ):
        assert said in told, said
    assert "kl_weight" not in told


def test_losses_of_others_are_lines_that_can_be_seen(tmp_path):
    write_run(tmp_path, "gqa", 0, 4.0)
    results = load([tmp_path])
    assert valid_loss(results).figure["layout"]["levels"] == []
    results.references.append(("<source>", 2.5))
    plot = valid_loss(results)
    assert plot.figure["layout"]["levels"] == [{"y": 2.5, "text": "&lt;source&gt;"}]
    assert all(view["yaxis"][0] < 2.5 for view in plot.views.values() if view)


def test_the_headline_is_before_what_rows_are_and_counts_agree(tmp_path):
    for seed in range(3):
        for name, loss in (("gqa", 4.0), ("mla", 4.1), ("gva-drope-16", 4.2), ("fast", 4.3)):
            fields = {"map_lr": 32.0} if name == "fast" else {}
            if name != "mla" or seed < 2:
                lost = loss * (1 + seed / 400)
                write_run(tmp_path, name, seed, lost, variant="gva-drope-16" if fields else None, fields=fields)
    assert main(["report", str(tmp_path)]) == 0
    html = words(read(tmp_path / "report"))
    assert html.count("not corrected for 2 comparisons") == 2, "as many as there are intervals"
    assert "<h1>4 rows compared</h1>" in html
    assert "<summary>4 rows<" in html
    assert "<b>not ranked, for want of three seeds in common:</b> MLA</li>" in html
    assert "Not ranked" not in html, "said once, after the headline"
    assert {">3 (0 to 2)<", ">2 (0, 1)<"} <= set(re.findall(r'data-head="seeds"(>[^<]+<)', html))
    fast = "GVA, rotated slice: caches values of 2 groups, 32 wide, and a rotated key of 16. "
    assert html.index("nats of validation loss") < html.index(f"{fast}Not as GQA: map_lr 1.0 → 32.0.")
    assert "MLA: caches a latent of 64, and a rotated key of 16" in html
    assert "differs from" not in html


def test_rows_are_told_apart_by_family_shade_dash_and_marker(tmp_path):
    write_run(tmp_path, "gqa", 0, 4.0)
    for i in range(12):
        write_run(tmp_path, f"maps-{i:02}", 0, 4.0, variant="gva-drope-16", fields={"map_lr": 2.0 + i})
    looks = styles(load([tmp_path]).rows)
    assert {style.family for name, style in looks.items() if name != "gqa"} == {"gva"}
    for kind in ("light", "dark"):
        assert len({(getattr(style, kind), style.dash, style.symbol) for style in looks.values()}) == 13
    near = list(looks.values())[1:]
    assert all(a.dash != b.dash and a.symbol != b.symbol for a, b in pairwise(near))
    assert [style.number for style in looks.values()] == list(range(1, 14))


def test_panels_with_data_are_there(full, capsys):
    assert main(["report", str(full), "--decode-csv", str(DECODE)]) == 0
    html = read(full / "report")
    tasks = [f"task-{task}" for task in FIVE]
    assert set(panels(html)) == {*ALWAYS, "shared-kv", "accuracy-forest", "rates", "decode", *tasks}
    assert "ranks nothing" not in html
    assert "<b>higher validation loss than GQA:</b> Shared KV, GVA + DRoPE 16" in html
    assert "for each row by itself, not corrected for 2 comparisons." in html.partition("<nav")[0]
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("index.html")
    assert "gva-drope-16" in shown


def test_decode_speed_stands_above_that_of_the_kernel(tmp_path):
    keep(write_run(tmp_path, "gqa", 0, 4.0), SPEED)
    keep(write_run(tmp_path, "gva-drope-16", 0, 4.0), {**SPEED, "tokens_per_second": 1730.0})
    assert main(["report", str(tmp_path), "--decode-csv", str(DECODE)]) == 0
    section = read(tmp_path / "report").partition('<section id="decode-speed">')[2].partition("</section>")[0]
    assert section.index(">1.73×</td>") < section.index('data-plot="decode"')
    assert (tmp_path / "report" / "decode.csv").is_file()


def test_it_is_self_contained_small_and_reproducible(full):
    results = load([full])
    write_report(results, full / "a", DECODE)
    write_report(load([full]), full / "b", DECODE)
    html = read(full / "a")
    assert html == read(full / "b")
    assert len(html.encode()) < 3_000_000
    own = re.sub(r'<script type="text/plain" id="library">.*?</script>', "", html, flags=re.S)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", own)
    assert "default-src 'none'" in own
    assert "{{" not in re.sub(r"<script.*?</script>|<style.*?</style>", "", own, flags=re.S)


def test_names_of_folders_cannot_break_the_page(tmp_path):
    write_run(tmp_path, "gqa", 0, 4.0)
    folder = write_run(tmp_path, "mla", 0, 4.0)
    alone = folder.rename(tmp_path / "runs" / "<b>&'")
    assert main(["report", str(tmp_path)]) == 0
    html = read(tmp_path / "report")
    assert alone.name not in html
    assert "&lt;b&gt;&amp;&#x27;" in html


HOSTILE = ["{{library}}", "{{script}}", "<img src=x>", "[a](javascript:b)", "`a`", "%{y}", "</script>", "a|b"]


def test_a_row_of_any_name_leaves_the_report_a_report(tmp_path):
    """As a mark of the page's template, HTML, Markdown, and what Plotly makes of texts."""
    write_run(tmp_path, "gqa", 0, 4.0)
    for name in HOSTILE:
        run = write_run(tmp_path, name.replace("/", ""), 0, 4.1, variant="mla")
        record = json.loads((run.parent / "row.json").read_text())
        (run.parent / "row.json").write_text(json.dumps(record | {"data": "<script>\n# [b](c)"}))
    assert main(["report", str(tmp_path)]) == 0
    html, text = read(tmp_path / "report"), (tmp_path / "report" / "report.md").read_text()
    assert html.count('id="library"') == html.count("<script>") == 1
    assert html.count(f'id="library">{plotly_script()}</script>') == 1, "no name has taken its place"
    shown = html.partition('<script type="application/json"')[0]
    assert not re.search(r"<img|<script", shown.partition("<body>")[2])
    assert "{{library}}" in shown
    drawn = json.loads(re.search(r'id="data">(.*?)</script>', html, flags=re.S)[1])["plots"]
    names = {trace["name"] for plot in drawn.values() for trace in plot["figure"]["data"]}
    assert {"&lt;img src=x&gt;", "%&#123;y}"} <= names
    assert not re.search(
        r"<(?!!)|(?<!\\)`|\]\(|^# \[", re.sub(r"!\[\]\(attention-[a-z-]+\.svg\)", "", text), flags=re.M
    )
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert any("a\\|b" in line for line in rows)


def test_a_link_in_the_report_of_a_stranger_is_not_written_through(tmp_path, capsys):
    write_run(tmp_path / "a", "gqa", 0, 4.0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("precious")
    report = tmp_path / "a" / "report"
    report.mkdir()
    names = ["runs.csv", "accuracy.csv", "report.md", "index.html", "attention-scale.svg"]
    for name in names:
        (report / name).symlink_to(elsewhere / "file")
    assert main(["report", str(tmp_path / "a")]) == 0
    assert not any((report / name).is_symlink() for name in names)
    shutil.rmtree(report)
    report.symlink_to(elsewhere)
    assert main(["report", str(tmp_path / "a")]) == 2
    assert "report: a link to" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in elsewhere.iterdir()] == [("file", "precious")]


def test_what_commands_a_terminal_is_shown(tmp_path, capsys):
    write_run(tmp_path, "gqa", 0, 4.0, versions={"torch": "1"})
    write_run(tmp_path, "mla", 0, 4.0, versions={"torch": "\x1b[2J"})
    assert main(["report", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "\\x1b[2J" in told


def test_without_plotly_the_tables_are_written_and_the_page_is_asked_for(tmp_path, monkeypatch, capsys):
    from gva.report import page

    write_run(tmp_path, "gqa", 0, 4.0)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "index.html").write_text("an earlier page")
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.delitem(sys.modules, "plotly.offline", raising=False)
    page.plotly_script.cache_clear()
    assert main(["report", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "plotly is missing" in captured.err
    assert captured.out.rstrip().endswith("report.md")
    assert not (tmp_path / "report" / "index.html").exists()
    assert (tmp_path / "report" / "runs.csv").is_file()


def test_a_decode_table_of_another_shape_is_refused(tmp_path, capsys):
    write_run(tmp_path, "gqa", 0, 4.0)
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    assert main(["report", str(tmp_path), "--decode-csv", str(other)]) == 2
    assert "gva bench decode" in capsys.readouterr().err


def test_a_decode_table_is_looked_at_before_training(tmp_path, capsys):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    for name, told in (("other.csv", "gva bench decode"), ("nowhere.csv", "No such file")):
        words = ["--preset", "demo", "--out", str(tmp_path / "out"), "--decode-csv", str(tmp_path / name)]
        assert main(["compare", *words]) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    ragged = DECODE.read_text().splitlines()
    names = ragged[0].split(",")
    row = ragged[1].split(",")
    row[names.index("ragged")] = "True"
    (tmp_path / "ragged.csv").write_text("\n".join([ragged[0], ",".join(row)]) + "\n")
    with pytest.raises(ValueError, match="no row of one token per sequence"):
        decode_speed(tmp_path / "ragged.csv")


def test_shared_kv_is_shown_whichever_row_comes_first(tmp_path):
    write_run(tmp_path, "gqa", 0, 4.0)
    write_run(tmp_path, "shared-kv", 0, 4.1)
    results = load([tmp_path])
    assert shared_kv(results) is not None
    results.rows.reverse()
    assert shared_kv(results) is not None


def test_folders_that_do_not_compare_are_refused(tmp_path, capsys):
    write_run(tmp_path, "gqa", 0, 4.0)
    write_run(tmp_path, "mla", 0, 4.0, valid_tokens=12)
    assert main(["report", str(tmp_path)]) == 2
    assert "their losses do not compare" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()
