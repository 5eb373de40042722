"""Tables and plots in the documentation are those that the measured CSVs give."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("script", "files"), [("benchmarks/table.py", 4), ("studies/table.py", 1), ("studies/kept.py", 1)]
)
def test_tables_and_plots_are_current(script, files):
    pages = runpy.run_path(str(ROOT / script))["pages"]()
    assert len(pages) == files
    for path, content in pages.items():
        assert path.read_text(encoding="utf-8") == content, f"{path.name}: run python {script}"


def test_every_row_says_where_it_comes_from():
    for path in (ROOT / "benchmarks" / "results").glob("*.csv"):
        header = path.read_text().splitlines()[0].split(",")
        assert {"gpu", "torch", "commit"} <= set(header), path.name
