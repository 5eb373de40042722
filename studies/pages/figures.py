"""What may stand in a page: the rows of every report by name, and a number of theirs as text."""

from __future__ import annotations

import statistics
from collections.abc import Collection
from typing import Any

import measured
import tables

from gva import GvaConfig, cost
from gva.report.tables import signed, spread
from gva.study.reports import read_reports
from gva.study.results import ComparedRow, Results
from gva.study.runs import TASKS, score
from gva.study.statistics import Estimate, paired

# What the paper says of its 350M models after 30B tokens: average accuracy over five tasks, and by task against GQA.
PAPER = {
    "gqa": "44.36", "gva16": "44.35", "gva24": "44.29", "mla": "43.88", "baseline": "43.91",
    "tasks": "HellaSwag −0.72, WinoGrande +0.87, OBQA +0.20, ARC-E +0.39, ARC-C −0.77",
}  # fmt: skip


class Rows(dict[str, ComparedRow]):
    """Of one report, by name."""

    def __init__(self, results: Results) -> None:
        super().__init__({row.name: row for row in results.rows})
        self.results = results


def change(row: ComparedRow, peer: ComparedRow, seeds: Collection[int] | None = None, step: int = 0) -> Estimate:
    """How far a row ends above another, paired by seed; over some seeds only, or at a step before the end."""
    ours, theirs = (tables.losses(r)[step] if step else r.valid_loss.values for r in (row, peer))
    found = paired(ours, theirs)
    assert found is not None, f"{row.name} and {peer.name} share no seed"
    return found if seeds is None else found.over(seeds)


def apart(row: ComparedRow, peer: ComparedRow, seeds: Collection[int] | None = None, step: int = 0) -> str:
    """As +0.078 [+0.060, +0.096], or seed by seed where they are too few for an interval."""
    return tables.apart(change(row, peer, seeds, step))


def apart_at(results: Results, row: str, peer: str, lr: float) -> str:
    """The same of two rows of a sweep at one rate."""
    ours, theirs = (next(r for r in results.rates if (r.row, r.lr) == (name, lr)).loss for name in (row, peer))
    found = paired(ours.values, theirs.values)
    assert found is not None, f"{row} and {peer} share no seed at {lr}"
    return tables.apart(found)


def far(row: ComparedRow, peer: ComparedRow, seeds: Collection[int] | None = None) -> str:
    """The same without interval or sign."""
    return f"{abs(change(row, peer, seeds).mean):.3f}"


def reach(row: ComparedRow, peer: ComparedRow) -> str:
    """From the nearest seed to the furthest, as +0.013 to +0.112."""
    values = change(row, peer).values.values()
    return f"{signed(min(values), 3)} to {signed(max(values), 3)}"


def percent(row: ComparedRow, peer: ComparedRow) -> str:
    """Of the other's loss."""
    found = change(row, peer)
    return f"{100 * found.mean / peer.valid_loss.over(found.values.keys()).mean:.1f}%"


def loss(row: ComparedRow) -> str:
    return tables.few(row.valid_loss) if row.valid_loss.n < 3 else spread(row.valid_loss, 3)


def above(row: ComparedRow, peer: ComparedRow) -> str:
    """In how many seeds, as `seven of eight`."""
    values = change(row, peer).values.values()
    return f"{WORDS[sum(v > 0 for v in values)]} of {WORDS[len(values)]}"


def scalars(row: ComparedRow | GvaConfig, ranks: int = 1) -> str:
    config = row.config if isinstance(row, ComparedRow) else row
    return f"{cost.cache_scalars_per_token_per_layer(config, ranks):g}"


def fewer(row: ComparedRow, peer: ComparedRow) -> str:
    """Parameters."""
    ours, theirs = (cost.parameters(r.config)["total"] for r in (row, peer))
    return f"{100 * (1 - ours / theirs):.1f}%"


def saved(row: GvaConfig, peer: GvaConfig) -> str:
    ours, theirs = (cost.cache_scalars_per_token_per_layer(config) for config in (row, peer))
    return f"{100 * (1 - ours / theirs):.1f}%"


def task_change(ours: ComparedRow, theirs: ComparedRow) -> dict[str, str]:
    """Accuracy in points less the other's, by the paper's name of the task, and of the average."""
    gaps = {t: 100 * (score(ours.runs[0].tasks[t]) - score(theirs.runs[0].tasks[t])) for t in TASKS}
    return {TASKS[t]: signed(gap, 1) for t, gap in gaps.items()} | {
        "average": signed(statistics.mean(gaps.values()), 1)
    }


def attended() -> str:
    """From the least to the most that attention gains over FlashAttention-3, at 1 GiB of cache and more."""
    rows = [row for row in measured.last_run("decode") if row["suite"] == "large"]
    gains = [float(row["speedup"]) for row in rows]
    return f"{min(gains):.2f} to {max(gains):.2f}"


def decoded(variant: str) -> str:
    """Of a whole model, over GQA."""
    at = {"variant": variant, "batch": "64", "context": "32768"}
    rows = [row for row in measured.read("end_to_end") if all(row[name] == value for name, value in at.items())]
    return f"{float(rows[-1]['against_first']):.2f}x" if rows else "–"


def served(variant: str) -> str:
    """Over GQA, each with the graphs that are best for it, as docs/serving.md has it."""
    measure = "output_tokens_per_second"
    runs = measured.served(measured.SERVED_AT)[1][measure, "256", "8192", "2048"]
    ours, theirs = (measured.best_median(measure, runs, name) for name in (variant, "gqa"))
    return f"{ours / theirs:.2f}x" if ours and theirs else "–"


WORDS = ["none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def known() -> dict[str, Any]:
    """The names that a page may use."""
    results = {name: report.load() for name, report in read_reports(tables.RESULTS / "reports.toml").items()}
    groups = {name.replace("small-", "").replace("-", "_"): Rows(found) for name, found in results.items()}
    at = {told: {n: row for n in tables.SWEPT if (row := tables.at_recipe(n, r))} for r, told in tables.RECIPES.items()}
    functions = (
        apart, apart_at, far, reach, percent, loss, above,
        scalars, fewer, saved, task_change, attended, decoded, served,
    )  # fmt: skip
    return {
        **groups,
        "at": at,
        "best": at["2e-3, warm-up 300"],
        "maps_fast": tables.at_recipe(tables.BEST, "-lr0.002"),
        "paper": PAPER,
        "t": tables,
        "results": results,
        "preset": GvaConfig.preset,
        **{function.__name__: function for function in functions},
    }
