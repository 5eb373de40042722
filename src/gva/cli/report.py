"""`gva report`: the report of finished runs, of one machine or several."""

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    report = commands.add_parser("report", help="write the report of finished runs, merged from several folders")
    report.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="what gva compare or gva train wrote")
    report.add_argument("--out", type=Path, help="by default FOLDER/report, of the first folder")
    report.add_argument("--baseline", help="the row that differences are taken against; by default gqa")
    report.add_argument("--decode-csv", type=Path, help="measured decode speed to show, as gva bench decode writes it")
    report.add_argument("--archive", type=Path, help="also copy the runs there, without weights and with fewer steps")
    report.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    write(arguments.folders, arguments.out or arguments.folders[0] / "report", arguments.baseline, arguments.decode_csv)
    if arguments.archive is not None:
        from gva.study.archive import archive

        count = archive(arguments.folders, arguments.archive)
        print(f"{arguments.archive}: {count} run{'s' if count != 1 else ''}")
    return 0


def write(
    folders: list[Path], out: Path, baseline: str | None, decode_csv: Path | None, baseline_needed: bool = True
) -> None:
    """Read the runs, write every file of the report, print the summary and where it is."""
    from gva.report import write_report
    from gva.report.tables import summary_text
    from gva.study.results import load

    results = load(folders, baseline, baseline_needed)
    written = write_report(results, out, decode_csv)
    print(f"\n{summary_text(results)}\n")
    print(f"report: {written}")
