"""`gva report`: the report of finished runs, of one machine or several."""

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    report = commands.add_parser("report", help="write the report of finished runs, merged from several folders")
    given = "what gva compare or gva train wrote; or one TOML file that names several reports and the runs of each"
    report.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help=given)
    report.add_argument("--out", type=Path, help="by default FOLDER/report, of the first folder; NAME/ for NAME.toml")
    report.add_argument("--baseline", help="the row that differences are taken against; by default gqa")
    report.add_argument("--decode-csv", type=Path, help="measured decode speed to show, as gva bench decode writes it")
    report.add_argument("--archive", type=Path, help="also copy the runs there, without weights and with fewer steps")
    report.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gva.run.files import within

    first = arguments.folders[0]
    if first.suffix == ".toml":
        return _write_all(first, arguments)
    out = arguments.out or within(first, "report")
    write(arguments.folders, out, arguments.baseline, arguments.decode_csv)
    if arguments.archive is not None:
        from gva.study.archive import archive

        count = archive(arguments.folders, arguments.archive)
        print(f"{arguments.archive}: {count} run{'s' if count != 1 else ''}")
    return 0


def _write_all(path: Path, arguments: argparse.Namespace) -> int:
    """Every report of a list, each in a folder of its name."""
    from gva.errors import check
    from gva.study.reports import read_reports

    others = " ".join(map(str, arguments.folders[1:]))
    given = {"FOLDER": others, "--baseline": arguments.baseline, "--archive": arguments.archive}
    for name, value in given.items():
        check(not value, name, str(value), f"goes with folders; {path} says what is reported, so give it alone")
    for name, report in read_reports(path).items():
        _write(report.load(), (arguments.out or path.with_suffix("")) / name, arguments.decode_csv)
    return 0


def write(
    folders: list[Path], out: Path, baseline: str | None, decode_csv: Path | None, baseline_needed: bool = True
) -> None:
    """Read the runs, write every file of the report, print the summary and where it is."""
    from gva.study.results import load

    _write(load(folders, baseline, baseline_needed), out, decode_csv)


def _write(results: Any, out: Path, decode_csv: Path | None) -> None:
    from gva.report import write_report
    from gva.report.tables import summary_text
    from gva.text import printable

    written = write_report(results, out, decode_csv)
    print(f"\n{printable(summary_text(results))}\n")
    print(f"report: {written}")
