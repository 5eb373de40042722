"""Writes the table of results/README.md, what is kept of which study: python studies/kept.py"""

import json
import pathlib
import re

from gva.report.tables import Table, fill

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "results" / "README.md"


def kept_table() -> str:
    studies = sorted(runs.parent.relative_to(PAGE.parent).as_posix() for runs in PAGE.parent.rglob("runs"))
    header = ["study", "rows", "seeds", "runs", "commits"]
    return Table(header, [("", False, cells(name)) for name in studies]).markdown()


def cells(study: str) -> list[str]:
    records = sorted((PAGE.parent / study).glob("runs/*/seed-*/run.json"))
    found = [json.loads(record.read_text(encoding="utf-8")) for record in records]
    rows = {record.parent.parent for record in records}
    seeds = sorted({run["identity"]["recipe"]["seed"] for run in found})
    commits = dict.fromkeys(run["versions"]["commit"] for run in found)
    what = f"[`{study}`](../studies/{study}.toml): {question(study)}"
    return [what, str(len(rows)), ", ".join(map(str, seeds)), str(len(records)), ", ".join(commits)]


def question(study: str) -> str:
    """The first sentence of a matrix."""
    text = (ROOT / "studies" / f"{study}.toml").read_text(encoding="utf-8")
    comment = " ".join(line.removeprefix("# ") for line in text.partition("\npreset")[0].splitlines())
    return re.split(r"(?<=[.?]) ", comment)[0]


def pages() -> dict[pathlib.Path, str]:
    """The page and what it should hold."""
    return {PAGE: fill(PAGE.read_text(encoding="utf-8"), {"kept": kept_table()})}


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content, encoding="utf-8")
