"""What is kept of finished runs where weights and every step would be too much: a repository, say."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gva.run.folder import RUN
from gva.run.metrics import METRICS, is_done, read_metrics
from gva.study.matrix import ROW

EVERY = 10  # of the steps, one in so many is kept, besides the first and the last


def archive(folders: Iterable[Path], out: Path, every: int = EVERY) -> int:
    """Copy every finished run to out/runs/ROW/seed-N: its record, all its evaluations, one step in `every`.

    A report can be made of the copy, its rows in the same order. Returns the number of runs; one that is there already
    is written again."""
    count = 0
    places: dict[str, int] = {}
    for folder in folders:
        for _, record in sorted((_row(file.parent).get("order", 0), file) for file in folder.rglob(RUN)):
            run, row = record.parent, _row(record.parent)
            if not is_done(run):
                continue
            seed = json.loads(record.read_text())["identity"]["recipe"]["seed"]
            name = row.get("name", run.name)
            place = places.setdefault(name, len(places))
            kept = out / "runs" / name / f"seed-{seed}"
            if kept.resolve() == run.resolve():
                continue
            kept.mkdir(parents=True, exist_ok=True)
            if row:
                (kept.parent / ROW).write_text(json.dumps({**row, "order": place}, indent=2))
            shutil.copyfile(record, kept / RUN)
            (kept / METRICS).write_text(_thinned(run, every))
            count += 1
    return count


def _row(run: Path) -> dict[str, Any]:
    """The record of the row that a run belongs to; empty where it was trained by itself."""
    record = run.parent / ROW
    return json.loads(record.read_text()) if record.is_file() else {}


def _thinned(run: Path, every: int) -> str:
    lines = read_metrics(run)
    last = max(line["step"] for line in lines)
    keep = [line for line in lines if line["kind"] != "step" or line["step"] % every == 0 or line["step"] in (1, last)]
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in keep)
