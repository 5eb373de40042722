"""The matrix of a comparison: named rows, each a variant with fields of its own, times seeds."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gva.config import VARIANTS, GvaConfig
from gva.errors import check, check_choice, nearest
from gva.run.atomic import write_atomically
from gva.run.files import inside, read_object, within
from gva.train.recipe import FURTHER, RECIPES, Recipe, build, further, read_fields
from gva.train.trained import Given, open_given

ROW = "row.json"
RUNS = "runs"  # where the rows of a comparison lie
# The seven rows of the paper's table, and its failed first cut.
PAPER = (
    "gqa", "mla", "shared-kv", "gva-baseline", "gva-scale-matched", "gva-variance-fixed", "gva-drope-24",
    "gva-drope-16",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the comparison. `overrides` are fields of the recipe or the model."""

    name: str
    variant: str  # empty where it begins from a checkpoint, whose model it is
    seeds: tuple[int, ...]
    overrides: dict[str, Any] = field(default_factory=dict)
    of: str | None = None  # in a sweep: the row that this one is a learning rate of
    start: Path | None = None  # the checkpoint that it begins from
    teacher: Path | None = None

    def given(self) -> Given:
        """Its trained weights, which must be there."""
        return open_given(self.start, self.teacher)

    def build(
        self, preset: str, seed: int, vocab_size: int | None = None, given: Given | None = None
    ) -> tuple[GvaConfig, Recipe]:
        """`given` is what `given()` was, where it is known already."""
        if self.start is None:
            return build(preset, self.variant, {**self.overrides, "seed": seed}, vocab_size)
        start = (given or self.given()).start
        assert start is not None
        return start.config, self.recipe(preset, seed)

    def recipe(self, preset: str, seed: int) -> Recipe:
        """Of one seed, which with the same weights to begin from is the order of the data."""
        if self.start is None:
            return self.build(preset, seed)[1]
        return further(preset, {**self.overrides, "seed": seed})


@dataclass(frozen=True)
class Matrix:
    preset: str
    rows: tuple[Row, ...]
    baseline: str | None = None  # what differences are taken against; gqa or the first row where not given

    def runs(self) -> list[tuple[Row, int]]:
        return [(row, seed) for row in self.rows for seed in row.seeds]

    def sweep(self, rates: Iterable[float]) -> "Matrix":
        """Every row at each learning rate."""
        rates = sorted(set(rates))
        for row in self.rows:
            check("lr" not in row.overrides, "lr", row.overrides.get("lr"), f"row {row.name} is swept: give no rate")
        rows = tuple(
            replace(row, name=f"{row.name}-lr{rate:g}", overrides={**row.overrides, "lr": rate}, of=row.name)
            for row in self.rows
            for rate in rates
        )
        return replace(self, rows=rows)


# What `gva compare --preset P` runs when nothing else is said: variants, seeds and fields for all rows.
USUAL: tuple[tuple[str, ...], int, dict[str, Any]] = ((*PAPER, "gva"), 3, {})
DEFAULTS = {
    "demo": (
        ("gqa", "shared-kv", "gva-baseline", "gva-drope-16", "gva"),
        1,
        {"eval_every": 20, "diagnostics_every": 20, "checkpoint_every": 60},
    ),
    "small": (USUAL[0], 3, {"diagnostics_every": 100, "eval_every": 100}),
    "paper-350m": (USUAL[0], 3, {"diagnostics_every": 500}),
}


def simple_matrix(
    preset: str,
    variants: Iterable[str] | None = None,
    seeds: int | None = None,
    rates: dict[str, float] | None = None,
    overrides: dict[str, Any] | None = None,
) -> Matrix:
    """The matrix of the command line: a row per variant, the same fields in each, a rate of its own if wished."""
    check_choice("preset", preset, RECIPES)
    usual, count, fields = DEFAULTS.get(preset, USUAL)
    names = list(usual if variants is None else variants)
    for name in rates or {}:
        check_choice("--lr", name, names)
    common = _fit_intervals(preset, {**fields, **(overrides or {})}, overrides or {})
    own = {name: {"lr": rate} for name, rate in (rates or {}).items()}
    chosen = _seeds(count if seeds is None else seeds)
    return _checked(Matrix(preset, tuple(Row(name, name, chosen, {**common, **own.get(name, {})}) for name in names)))


def read_matrix(path: Path, overrides: dict[str, Any] | None = None, models: Path | None = None) -> Matrix:
    """A TOML file: `preset`, `seeds`, `baseline` and fields for all rows on top, then a table [[row]] for each with
    `name`, `variant`, `seeds` and fields of its own. `overrides` win over both.

    Instead of a variant a row may have `from`, the checkpoint that it begins with, and any row a `teacher`: paths from
    the folder `models`, or else from where the file lies."""
    content = read_fields(path)
    listed = content.pop("row", None)
    check(isinstance(listed, list) and bool(listed), "row", listed, f"{path} needs at least one [[row]]")
    preset, baseline = content.pop("preset", None), content.pop("baseline", None)
    check_choice("preset", preset, {**RECIPES, **FURTHER}, f"named at the top of {path}")
    seeds = content.pop("seeds", DEFAULTS.get(preset, USUAL)[1])
    rows = []
    for entry in listed:
        entry = {**content, **entry, **(overrides or {})}
        name = entry.pop("name", entry.get("variant"))
        check(isinstance(name, str), "name", name, f"every [[row]] of {path} needs a name or a variant")
        start, teacher = (_path(entry, key, models or path.parent) for key in ("from", "teacher"))
        check(start is None or "variant" not in entry, "variant", entry.get("variant"), "is that of from: leave it out")
        variant = entry.pop("variant", name if start is None else "")
        rows.append(Row(name, variant, _seeds(entry.pop("seeds", seeds)), entry, None, start, teacher))
    return _checked(Matrix(preset, tuple(rows), baseline))


def choose(matrix: Matrix, only: Iterable[str] = (), shard: str | None = None) -> list[tuple[Row, int]]:
    """The runs that are ours: those named ROW or ROW:SEED, then the i-th of n equal stretches.

    Stretches keep the seeds of a row together where the counts allow, since they share a process and its compilation.
    """
    runs = matrix.runs()
    wanted = list(only)
    if wanted:
        known = {f"{row.name}:{seed}" for row, seed in runs} | {row.name for row, _ in runs}
        for name in wanted:
            check(name in known, "--only", name, f"no such ROW or ROW:SEED in the matrix{nearest(name, known)}")
        runs = [(row, seed) for row, seed in runs if row.name in wanted or f"{row.name}:{seed}" in wanted]
    if shard is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", shard)
        index, count = (int(part) for part in match.groups()) if match else (0, 0)
        check(1 <= index <= count, "--shard", shard, "must be i/n with i from 1 to n, such as 2/4")
        runs = runs[len(runs) * (index - 1) // count : len(runs) * index // count]
    return runs


def row_folder(out: Path, name: str) -> Path:
    """Where the runs of a row lie in the folder of a comparison."""
    return within(within(out, RUNS), name)


def run_folder(out: Path, name: str, seed: int) -> Path:
    return within(row_folder(out, name), f"seed-{seed}")


def write_row(folder: Path, matrix: Matrix, row: Row, data: str = "") -> None:
    """Leave beside the runs of a row what they are, so that a report can be made of the folders alone; `data` names
    what they were trained on."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"name": row.name, "variant": row.variant, "of": row.of or row.name, "order": matrix.rows.index(row)}
    record |= {"preset": matrix.preset, "data": data, "overrides": row.overrides}
    write_atomically(folder / ROW, json.dumps(record, indent=2))


def read_row(run: Path) -> dict[str, Any]:
    """What is left beside a run of its row; empty where it was trained by itself."""
    record = run.parent / ROW
    if not record.is_file():
        return {}
    row = read_object(record, "copy it again, or remove it: the row is then called as its folder")
    for name in ("name", "of"):
        inside(run.parent.parent, row.get(name, run.parent.name), record)
    usual: dict[str, Any] = {"order": 0, "overrides": {}, "data": ""}
    fine = all(isinstance(row.get(name, value), type(value)) for name, value in usual.items())
    check(fine, str(record), row, "order must be a number, overrides an object and data a text; copy it again")
    return row


def _checked(matrix: Matrix) -> Matrix:
    """Refuse, before anything runs, what could not be built or told apart."""
    names = [row.name for row in matrix.rows]
    check(bool(names), "--variants", "", f"needs at least one of {list(VARIANTS)}")
    for row in matrix.rows:
        check(names.count(row.name) == 1, "name", row.name, "two rows have this name")
        fine = re.fullmatch(r"[\w.+-]+", row.name)
        check(fine is not None, "name", row.name, "is a folder's name: letters, digits and . _ + - only")
        check("seed" not in row.overrides, "seed", row.overrides.get("seed"), "a comparison takes seeds=")
        recipe = row.recipe(matrix.preset, row.seeds[0])  # whether checkpoints are there is seen when they are needed
        alike = row.start is not None and recipe.data_seed is not None and len(row.seeds) > 1
        check(not alike, "data_seed", recipe.data_seed, "seeds of a row with from differ in the order of data alone")
    if matrix.baseline is not None:
        check_choice("baseline", matrix.baseline, names)
    return matrix


def _path(entry: dict[str, Any], key: str, folder: Path) -> Path | None:
    given = entry.pop(key, None)
    check(given is None or isinstance(given, str), key, given, "must be the path of a checkpoint")
    return None if given is None else folder / given


def _seeds(given: Any) -> tuple[int, ...]:
    seeds = tuple(range(given)) if type(given) is int else tuple(given) if isinstance(given, list) else ()
    fine = bool(seeds) and all(type(seed) is int for seed in seeds) and len(set(seeds)) == len(seeds)
    check(fine, "seeds", given, "must be a positive count or a list of different integers")
    return seeds


def _fit_intervals(preset: str, fields: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """A run cut short is still looked at a few times, unless the intervals were asked for."""
    steps = fields.get("steps", RECIPES[preset]["steps"])
    ours = [name for name in ("eval_every", "diagnostics_every") if name in fields and name not in asked]
    return {**fields, **{name: min(fields[name], max(1, steps // 4)) for name in ours if type(steps) is int}}
