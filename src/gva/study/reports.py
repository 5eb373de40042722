"""Reports by name: a TOML file says of which runs each is made, so that a run lies in one place and stands in many."""

from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path

from gva.errors import check
from gva.study.results import Results, load
from gva.train.recipe import read_fields


@dataclass(frozen=True)
class Report:
    folders: list[Path]
    baseline: str | None
    data: str = ""  # what the runs were trained on, in words that replace those which the runs recorded

    def load(self) -> Results:
        results = load(self.folders, self.baseline)
        return replace(results, data=self.data or results.data)


def read_reports(path: Path) -> dict[str, Report]:
    """A table for each report: `runs`, folders or patterns from where the file lies, and maybe `baseline`. Above them
    may stand `data`, words for what all were trained on."""
    content = read_fields(path)
    data = content.pop("data", "")
    check(isinstance(data, str), "data", data, f"{path} needs words there: what the runs were trained on")
    check(bool(content), "FILE", str(path), "names no report; give each a table with its runs")
    return {name: _report(path, name, table, data) for name, table in content.items()}


def _report(path: Path, name: str, table: object, data: str) -> Report:
    fine = isinstance(table, dict) and {"runs"} <= table.keys() <= {"runs", "baseline"}
    check(fine, name, table, f"{path} needs a table [{name}] with runs, a list, and maybe baseline")
    assert isinstance(table, dict)
    found = {pattern: sorted(glob(pattern, root_dir=path.parent)) for pattern in table["runs"]}
    for pattern, folders in found.items():
        check(bool(folders), "runs", pattern, f"nothing like it beside {path}; mend the report {name}")
    return Report([path.parent / f for folders in found.values() for f in folders], table.get("baseline"), data)
