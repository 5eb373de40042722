"""From finished runs to files a person would look at: one HTML page, Markdown, and the numbers as CSV."""

import sys
from pathlib import Path

from gva.run.atomic import write_atomically
from gva.run.files import remove
from gva.study.results import Results


def write_report(results: Results, out: Path, decode_csv: Path | None = None) -> Path:
    """Write the report into `out` and return its main file: the page, or the Markdown where plotly is missing."""
    from gva.report import curves, numbers
    from gva.report.page import markdown, page
    from gva.report.scale import write_figures

    out.mkdir(parents=True, exist_ok=True)
    written = {
        "runs": numbers.run_rows(results),
        "differences": numbers.difference_rows(results),
        "accuracy": numbers.accuracy_rows(results),
        "costs": numbers.cost_rows(results),
        "rates": numbers.rate_rows(results),
        "decode": numbers.speed_rows(results),
        "curves": curves.curve_rows(results),
    }
    for name, rows in written.items():
        path = out / f"{name}.csv"
        if rows:
            write_atomically(path, numbers.csv_text(rows))
        else:
            remove(path)  # of an earlier report of other runs
    write_figures(out)
    write_atomically(out / "report.md", markdown(results))
    try:
        html = page(results, decode_csv)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "plotly":
            raise
        print(
            "The page was not written: plotly is missing. Here, or where these folders are copied to: "
            "pip install 'grouped-value-attention[report]', then gva report",
            file=sys.stderr,
        )
        remove(out / "index.html")  # of an earlier report of other runs
        return out / "report.md"
    write_atomically(out / "index.html", html)
    return out / "index.html"
