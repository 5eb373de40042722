"""Tables and plots in the documentation are those that the measured CSVs give."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_tables_and_plots_are_current():
    pages = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))["pages"]()
    assert len(pages) == 5
    for path, content in pages.items():
        assert path.read_text() == content, f"{path.name}: run python benchmarks/table.py"


def test_every_row_says_where_it_comes_from():
    for path in (ROOT / "benchmarks" / "results").glob("*.csv"):
        header = path.read_text().splitlines()[0].split(",")
        assert {"gpu", "torch", "commit"} <= set(header), path.name
