"""From finished runs to files a person would look at: one HTML page, Markdown, and the numbers as CSV."""

import sys
from pathlib import Path

from gva.study.results import Results


def write_report(results: Results, out: Path, decode_csv: Path | None = None) -> Path:
    """Write the report into `out` and return its main file: the page, or the Markdown where plotly is missing."""
    from gva.report import curves, tables
    from gva.report.page import markdown, page
    from gva.report.scale import write_figures

    out.mkdir(parents=True, exist_ok=True)
    numbers = {
        "runs": tables.run_rows(results),
        "differences": tables.difference_rows(results),
        "accuracy": tables.accuracy_rows(results),
        "costs": tables.cost_rows(results),
        "rates": tables.rate_rows(results),
        "decode": tables.speed_rows(results),
        "curves": curves.curve_rows(results),
    }
    for name, rows in numbers.items():
        path = out / f"{name}.csv"
        if rows:
            path.write_text(tables.csv_text(rows), encoding="utf-8")
        else:
            path.unlink(missing_ok=True)  # of an earlier report of other runs
    write_figures(out)
    (out / "report.md").write_text(markdown(results), encoding="utf-8")
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
        (out / "index.html").unlink(missing_ok=True)  # of an earlier report of other runs
        return out / "report.md"
    (out / "index.html").write_text(html, encoding="utf-8")
    return out / "index.html"
