"""What is kept of finished runs where weights and every step would be too much: a repository, say."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gva.run.atomic import write_atomically
from gva.run.folder import RUN, differences, read_run
from gva.run.metrics import is_done, keep, read_metrics
from gva.study.matrix import ROW, read_row, run_folder
from gva.train.recipe import identity_defaults

STEPS = 120  # logged steps that are kept of a run, about
# How finely logged steps are kept, and what diagnostics say of layers and heads: as they are drawn. The rest stays
# whole, the losses that diagnostics compare too, whose small differences count.
STEP = ".5g"
BY_LAYER = {"previous_token_attention": ".4f", "qk_scales": ".5g"}


def archive(folders: Iterable[Path], out: Path, steps: int = STEPS) -> int:
    """Copy every finished run to out/runs/ROW/seed-N: its record, all its evaluations, about so many logged steps.

    A report can be made of the copy, its rows in the same order. Returns the number of runs; one that is there already
    is written again, and where another lies in its place, nothing is."""
    found: dict[Path, tuple[Path, dict[str, Any]]] = {}
    places: dict[str, int] = {}
    for folder in folders:
        for _, run in sorted((read_row(file.parent).get("order", 0), file.parent) for file in folder.rglob(RUN)):
            row = read_row(run)
            if not is_done(run):
                continue
            name = row.get("name", run.name)
            place = places.setdefault(name, len(places))
            kept = run_folder(out, name, read_run(run)["identity"]["recipe"]["seed"])
            if kept.resolve() != run.resolve():
                _refuse_another(kept, run, {place: other for place, (other, _) in found.items()})
                found[kept] = run, row and {**row, "order": place, "overrides": _portable(row["overrides"])}
    for kept, (run, row) in found.items():
        kept.mkdir(parents=True, exist_ok=True)
        if row:
            _write(kept.parent / ROW, row)
        keep(kept, _thinned(read_metrics(run), steps))
        record = read_run(run)  # last, since what has one is a run that is kept
        _write(kept / RUN, {**record, "recipe": _portable(record["recipe"])})
    return len(found)


def _refuse_another(kept: Path, run: Path, others: dict[Path, Path]) -> None:
    """Raise ValueError where this run would replace another one, or lie beside one that is no other seed of it.
    `others` are runs by the places that they will have."""
    ours, another = read_run(run)["identity"], "give another --archive, or rename the row of one"
    there = {file.parent: file.parent for file in sorted(kept.parent.glob(f"*/{RUN}"))} | others
    for place, other in there.items():
        if place.parent != kept.parent:
            continue
        changed = differences(read_run(other)["identity"], ours, identity_defaults())
        if place == kept and (changed or read_metrics(other, "eval") != read_metrics(run, "eval")):
            raise ValueError(f"{other}: another run than {run}, with the same name and seed; {another}")
        if changed.keys() - {"recipe.seed"}:
            raise ValueError(f"{other}: {run} is no other seed of it but differs in {', '.join(changed)}; {another}")


def _portable(fields: dict[str, Any]) -> dict[str, Any]:
    """Where a folder lay on one machine says nothing on another; its name may."""
    return {k: Path(v).name if k == "tasks_data" else v for k, v in fields.items()}


def _thinned(lines: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    last = max(line["step"] for line in lines)
    every = 10 * -(-last // (10 * steps))
    left = [line for line in lines if line["kind"] != "step" or line["step"] % every == 0 or line["step"] in (1, last)]
    return [_coarse(line) for line in left]


def _coarse(line: dict[str, Any]) -> dict[str, Any]:
    if line["kind"] == "diagnostics":
        return {k: _rounded(v, BY_LAYER[k]) if k in BY_LAYER else v for k, v in line.items()}
    return _rounded(line, STEP) if line["kind"] == "step" else line


def _rounded(value: Any, form: str) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v, form) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v, form) for v in value]
    return float(format(value, form)) if isinstance(value, float) else value


def _write(path: Path, record: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(record, indent=2))
