"""Tables and plots in the documentation are those that the measured CSVs give."""

import inspect
import re
import runpy
import shutil
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import gva

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize(
    ("script", "files"),
    [("benchmarks/table.py", 10), ("studies/pages", 21), ("studies/kept.py", 1), ("docs/draw.py", 3)],
)
def test_tables_and_plots_are_current(script, files):
    pages = runpy.run_path(str(ROOT / script))["pages"]()
    assert len(pages) == files
    for path, content in pages.items():
        assert path.read_text(encoding="utf-8") == content, f"{path.name}: run python {script}"


# Bars of a claim or of a test: what others say, and from where something counts.
SAID = {"0.9", "0.1", "0.25", "0.74"}


def test_no_measured_number_is_typed_into_a_page():
    folder = ROOT / "studies" / "pages"
    for path in folder.rglob("*.md"):
        prose = re.sub(r"\{\{.*?\}\}", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        typed = set(re.findall(r"\d+\.\d+(?!e-)\b", prose))
        assert typed <= SAID, f"{path.relative_to(ROOT)}: have it made from the runs"


def test_what_was_asked_is_met_in_whole_in_part_or_not(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    asked = import_module("asked")
    lines = [
        asked.Asked("speed", 1.5, [1.5, 1.6], unit="x"),
        asked.Asked("speed", 1.5, [1.4, 1.6]),
        asked.Asked("time", 1.1, [1.2], most=True),
        asked.Asked("time", 1.1, [1.1], most=True, of="1 of 2 shapes"),
        asked.Asked("nothing", "2x"),
    ]
    verdicts = ["met", "met in 1 of 2", "missed", "met, on 1 of 2 shapes", "not measured"]
    assert [line.verdict() for line in lines] == verdicts
    assert lines[0].cells() == ["speed", "1.5x", "1.500x to 1.600x", "met"]
    assert asked.tally(lines) == "Of 5 lines, 1 was met, 2 were met in part, 1 was missed and 1 was not measured."
    assert asked.table(lines).splitlines()[-1] == "- nothing: 2x"


def test_every_row_says_where_it_comes_from():
    for path in (ROOT / "benchmarks" / "results").glob("*.csv"):
        header = path.read_text().splitlines()[0].split(",")
        assert {"gpu", "torch", "commit"} <= set(header), path.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_can_be_read_by_the_busy(page):
    """Its point first, soon something to look at, short cells, and few words."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    first = next(line for line in lines[1:] if line and not line.startswith("<!--"))
    assert not first.startswith(("#", "|", "!", "```")), f"begin with a sentence: {first}"
    assert any(line.startswith(("|", "![", "```")) for line in lines[:45]), (
        "no table, picture or code on the first screen"
    )
    prose, cells = read_apart(lines)
    assert [cell for cell in cells if len(cell) > 200] == []
    assert len(" ".join(prose).split()) <= 1500


def read_apart(lines):
    """Lines of prose, and the cells of tables, without what is code or a marker."""
    prose, cells, code = [], [], False
    for line in lines:
        if line.startswith("```"):
            code = not code
        elif not code and line.startswith("|"):
            cells += [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        elif not code and not line.startswith("<!--"):
            prose.append(line)
    return prose, cells


def test_what_is_held_against_the_pages():
    prose, cells = read_apart(["# A", "| a | b \\| c |", "```", "| code |", "```", "two words", "<!-- a: begin -->"])
    assert prose == ["# A", "two words"]
    assert [cell for cell in cells if cell] == ["a", "b \\| c"]


def test_curves_are_not_filled_in_either_theme(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.syspath_prepend(ROOT / "studies" / "pages")
    look = import_module("pictures").LOOK
    assert re.search(r"polyline\.line[^{}]*{[^}]*fill: none", look), "a class alone gives way to the dark colours"


def test_no_box_lies_on_another_and_no_arrow_runs_through_one():
    drawn = runpy.run_path(str(ROOT / "docs" / "draw.py"))
    width, height = drawn["BOX_WIDTH"], drawn["BOX_HEIGHT"]
    corners = {part: drawn["corner"](part) for part in drawn["PLACES"]}
    boxes = {part: (x - 4, y - 4, x + width + 4, y + height + 4) for part, (x, y) in corners.items()}
    assert set(boxes) == set(drawn["ARROWS"]) - drawn["EVERYWHERE"], "say in docs/draw.py where it stands"
    for part, (left, top, right, bottom) in boxes.items():
        others = [box for other, box in boxes.items() if other != part]
        assert not any(left < b[2] and b[0] < right and top < b[3] and b[1] < bottom for b in others), part
        assert left >= 0, part
        assert right <= drawn["WIDTH"], part
    for above, below, (x0, y0, x1, y1) in drawn["ends"](drawn["drawn_arrows"]()):
        assert y0 < y1, f"{above} must stand above {below}"
        for part in set(boxes) - {above, below}:
            left, top, right, bottom = boxes[part]
            along = [(x0 + (x1 - x0) * i / 100, y0 + (y1 - y0) * i / 100) for i in range(101)]
            assert not any(left < x < right and top < y < bottom for x, y in along), f"{above} to {below}: {part}"


def test_the_files_that_the_architecture_names_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/-]+(?:\.py|/))`", text) + re.findall(r"\]\(([^)]+)\)", text)
    assert len(named) > 50
    homes = [ROOT, ROOT / "src" / "gva", ROOT / "src" / "gva" / "attention", ROOT / "docs", ROOT / "tests" / "ops"]
    assert [name for name in named if not any((home / name).exists() for home in homes)] == []


def test_every_public_name_is_in_the_reference():
    named = set(re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE))
    ends = {name.rpartition(".")[2] for name in named}
    assert set(gva.__all__) - {"ops"} <= ends
    whole = [module for name in named if inspect.ismodule(module := importable(name))]
    of_modules = {name for module in whole for name in vars(module) if not name.startswith("_")}
    assert set(gva.ops.__all__) <= ends | of_modules


def importable(name: str) -> object:
    """The module or the thing in a module of this name; raises if there is none."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        return getattr(import_module(module), last)


def test_the_workflow_runs_what_must_hold():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert re.search(r"^\s+- run: \.ci/run$", text, re.MULTILINE)


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="no actionlint here")
def test_the_workflow_is_one():
    checked = subprocess.run(["actionlint"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_what_is_cited_is_the_paper_and_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert cited["version"] == project["version"] == gva.__version__
    assert cited["license"] == project["license"]
    paper = cited["preferred-citation"]
    assert paper["url"] == project["urls"]["Paper"] == f"https://arxiv.org/abs/{paper['identifiers'][0]['value'][6:]}"
    assert paper["title"] in " ".join(README.split())


def test_what_contributing_names_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+(?: [\w-]+)*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    known = {name for line in targets for name in line.split()}
    assert set(re.findall(r"`make ([\w-]+)`", text)) <= known
    paths = re.findall(r"`([\w.]+/[\w./]+)`", text)
    assert len(paths) > 3
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_code_of_the_kernels_page_runs(capsys):
    step, generator = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "kernels.md").read_text(), flags=re.S)
    statements = [line for line in step.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(statements) <= 40
    exec(step, {})
    assert float(capsys.readouterr().out.removeprefix("largest difference ")) < 0.02, "a bfloat16 result of size 1 to 2"
    exec(generator, {})
    first, *others = capsys.readouterr().out.splitlines()
    assert len(eval(first)) == 3
    assert [line.split()[0] for line in others] == ["0", "1"] * 8
