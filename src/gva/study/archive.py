"""What is kept of finished runs where weights and every step would be too much: a repository, say."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from gva.study.matrix import ROW
from gva.train.folder import RUN
from gva.train.metrics import METRICS, is_done, read_metrics

EVERY = 10  # of the steps, one in so many is kept, besides the first and the last


def archive(folders: Iterable[Path], out: Path, every: int = EVERY) -> int:
    """Copy every finished run to out/runs/ROW/seed-N: its record, all its evaluations, one step in `every`.

    A report can be made of the copy. Returns the number of runs; one that is there already is written again."""
    count = 0
    for folder in folders:
        for record in sorted(folder.rglob(RUN)):
            run = record.parent
            if not is_done(run):
                continue
            seed = json.loads(record.read_text())["identity"]["recipe"]["seed"]
            row = run.parent / ROW
            name = json.loads(row.read_text())["name"] if row.is_file() else run.name
            kept = out / "runs" / name / f"seed-{seed}"
            if kept.resolve() == run.resolve():
                continue
            kept.mkdir(parents=True, exist_ok=True)
            if row.is_file():
                shutil.copyfile(row, kept.parent / ROW)
            shutil.copyfile(record, kept / RUN)
            (kept / METRICS).write_text(_thinned(run, every))
            count += 1
    return count


def _thinned(run: Path, every: int) -> str:
    lines = read_metrics(run)
    last = max(line["step"] for line in lines)
    keep = [line for line in lines if line["kind"] != "step" or line["step"] % every == 0 or line["step"] in (1, last)]
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in keep)
