"""Rows of benchmarks/results/*.csv, as the tables, verdicts and pictures of the documentation take them."""

from __future__ import annotations

import csv
import pathlib
import statistics
from collections.abc import Iterable

RESULTS = pathlib.Path(__file__).parent / "results"
Row = dict[str, str]

LOAD = ("measure", "requests", "tokens_in", "tokens_out")
SERVED_AT = ("88d8d63", "5e925b8")  # the same package: the second lets the benchmark repeat
SERVED_LATER = ("1838319",)  # one load again, in a run of its own
OURS = "gva-drope-16"
Runs = dict[tuple[str, str], list[float]]  # of one load: the values of a variant with some graphs


def read(name: str) -> list[Row]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def last_run(name: str) -> list[Row]:
    """Rows that share run, GPU and commit with the last row."""
    rows = read(name)
    key = [k for k in ("date", "gpu", "torch", "triton", "commit", "read_limit_gb_per_s") if k in rows[0]]
    return [row for row in rows if all(row[k] == rows[-1][k] for k in key)]


def decoded(
    rows: Iterable[Row], mib: tuple[float, float] = (0, float("inf")), batch: bool | None = None, **fields: str
) -> list[Row]:
    """Decode rows with these fields, of that many MiB; `batch`: of several sequences, or of one. The plain case is one
    new token on uniform bfloat16 pages of 64."""
    wanted = {"S": "1", "page": "64", "values": "bf16", "ragged": "False", **fields}
    return [
        row
        for row in rows
        if all(row[k] == value for k, value in wanted.items())
        and mib[0] <= int(row["bytes"]) / 2**20 < mib[1]
        and (batch is None or (row["B"] != "1") == batch)
    ]


def twin(rows: Iterable[Row], row: Row, **fields: str) -> Row | None:
    """The row of the same shape but for these fields."""
    shape = {k: row[k] for k in ("B", "T", "H", "G", "d_h", "d_r", "S", "page", "layout", "values", "ragged")} | fields
    return next((other for other in rows if all(other[k] == value for k, value in shape.items())), None)


def served(commits: tuple[str, ...]) -> tuple[list[Row], dict[tuple[str, ...], Runs]]:
    """Rows of these commits that share everything but variant and graphs with the last of them, and what they give for
    each load."""
    rows = [row for row in read("serving") if row["commit"] in commits]
    free = {"case", "variant", "graphs", "value", "date", "commit", *LOAD}
    rows = [row for row in rows if all(row[k] == rows[-1][k] for k in row.keys() - free)]
    loads: dict[tuple[str, ...], Runs] = {}
    for row in rows:
        runs = loads.setdefault(tuple(row[k] for k in LOAD), {})
        runs.setdefault((row["variant"], row["graphs"]), []).append(float(row["value"]))
    return rows, loads


def best_median(measure: str, runs: Runs, variant: str) -> float | None:
    """With the graphs that are best for this variant."""
    best = min if measure.endswith("_ms") else max
    return best((statistics.median(values) for (name, _), values in runs.items() if name == variant), default=None)


def served_ratios(measure: str, tokens_out: str) -> list[float]:
    """Each run of GVA over the median of GQA, of the load with so many tokens out: they tell loads apart."""
    found = []
    for (name, _, _, out), runs in served(SERVED_AT)[1].items():
        gqa = best_median(name, runs, "gqa")
        if (name, out) == (measure, tokens_out) and gqa:
            found += [value / gqa for (variant, _), values in runs.items() if variant == OURS for value in values]
    return found
