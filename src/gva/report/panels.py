"""The pictures of a report as Plotly figures: plain dicts, colours by name, so that the page can paint both themes."""

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gva import cost
from gva.report import curves
from gva.report.curves import Curve
from gva.report.style import Style, label, styles
from gva.report.tables import valid_loss
from gva.study.results import TASKS, ComparedRow, Results, Run
from gva.study.statistics import Estimate

SETTLED = 0.1  # the share of a run that is left out of view at first, its losses being far above the rest


@dataclass
class Plot:
    """One picture: `figure` has data and layout; `views` name other y ranges that a button shows."""

    name: str
    title: str
    caption: str
    figure: dict[str, Any]
    height: int = 340
    wide: bool = False
    views: dict[str, Any] = field(default_factory=dict)


def _axes(x: str, y: str, **layout: Any) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}, **layout}


def _lines(row: str, style: Style, found: list[Curve], markers: bool = False) -> list[dict[str, Any]]:
    """Every seed as a thin line, the mean as a thick one that carries the label; with one seed, that one alone."""
    seeds = [curve for curve in found if curve.seed is not None]
    traces = []
    for curve in found:
        mean = curve.seed is None
        if not mean and len(seeds) == 1:
            continue
        name = label(row) if mean else f"{label(row)}, seed {curve.seed}"
        traces.append(
            {
                "type": "scatter", "mode": "lines+markers" if markers and mean else "lines", "x": curve.x, "y": curve.y,
                "name": name, "opacity": 1 if mean else 0.32, "hoverinfo": None if mean else "skip",
                "hovertemplate": "%{y:.4~g}" if mean else None,
                "line": {"color": f"@row:{row}", "width": 2.2 if mean else 1, "dash": style.dash},
                "marker": {"size": 6, "symbol": style.symbol, "color": f"@row:{row}"},
                "meta": {"row": row, "label": label(row) if mean else None},
            }
        )  # fmt: skip
    return traces


def _curves(
    results: Results, rows: Iterable[ComparedRow], read: Callable[[ComparedRow], list[Curve]], markers: bool = False
) -> list[dict[str, Any]]:
    drawn = styles([row.name for row in results.rows])
    return [trace for row in rows for trace in _lines(row.name, drawn[row.name], read(row), markers)]


def _settled_range(traces: list[dict[str, Any]]) -> list[float] | None:
    """The y range of what comes after the first steep part."""
    last = max(x for trace in traces for x in trace["x"])
    late = [y for t in traces for x, y in zip(t["x"], t["y"], strict=True) if x > SETTLED * last]
    if not late:
        return None
    room = 0.04 * (max(late) - min(late) or 1.0)
    return [min(late) - room, max(late) + room]


def training_loss(results: Results, rows: list[ComparedRow], name: str, title: str, caption: str) -> Plot:
    traces = _curves(results, rows, lambda row: curves.along(row, curves.training_loss))
    settled = _settled_range(traces)
    layout = _axes("training step", "training loss (nats per token)")
    if settled:
        layout["yaxis"]["range"] = settled
    width = curves.stretch(rows[0].runs[0])
    averaged = f" Each point averages {width} logged steps." if width > 1 else ""
    views = {f"after the first {SETTLED:.0%}": settled, "whole run": None} if settled else {}
    return Plot(name, title, caption + averaged, {"data": traces, "layout": layout}, 420, True, views)


def loss_gap(results: Results) -> Plot | None:
    rows = [row for row in results.rows if row.name != results.baseline]
    traces = _curves(results, rows, lambda row: curves.gap(results, row, curves.valid_loss), markers=True)
    if not traces:
        return None
    base = label(results.baseline)
    layout = _axes("training step", f"validation loss minus {base}'s (nats)", zero=base)
    caption = f"Below the line is better than {base} under the same seed."
    caption += " Thin lines are seeds, the thick one is their mean." if any(len(row.runs) > 1 for row in rows) else ""
    return Plot("gap", f"Distance to {base} while training", caption, {"data": traces, "layout": layout})


def forest(
    results: Results, read: Callable[[Run], float | None], name: str, title: str, unit: str, factor: float = 1.0
) -> Plot | None:
    """Each row's difference to the baseline: every seed a point, the mean with its interval."""
    drawn = styles([row.name for row in results.rows])
    found: list[tuple[str, Estimate]] = []
    for row in reversed(results.rows):
        change = results.against_baseline(row, read)
        if change is not None:
            found.append((row.name, change))
    traces = []
    for row_name, change in found:
        traces += _forest_row(row_name, drawn[row_name], change, factor)
    if not traces:
        return None
    base = label(results.baseline)
    layout = _axes(f"{unit}, minus {base}'s", "", zero_x=base)
    layout["yaxis"] |= {"categoryorder": "array", "categoryarray": [label(n) for n, _ in found], "automargin": True}
    layout["hovermode"] = "closest"
    caption = "One seed each: no interval."
    if any(change.n > 1 for _, change in found):
        caption = "Every small mark is a seed, paired with the same seed of the reference; the large one is their mean"
        intervals = any(change.interval for _, change in found)
        caption += ", the bar its 95% interval." if intervals else ". No interval: too few seeds, or all alike."
    return Plot(name, title, caption, {"data": traces, "layout": layout}, max(220, 120 + 38 * len(found)))


def _forest_row(row: str, style: Style, change: Estimate, factor: float) -> list[dict[str, Any]]:
    meta = {"row": row}
    values = [factor * value for value in change.values.values()]
    half = change.half_width
    return [
        {
            "type": "scatter", "mode": "markers", "x": values, "y": [label(row)] * len(values), "meta": meta,
            "marker": {"size": 7, "symbol": "circle-open", "color": f"@row:{row}", "line": {"width": 1.4}},
            "text": [f"seed {seed}" for seed in change.values],
            "hovertemplate": "%{text}: %{x:+.4~g}<extra></extra>", "name": f"{label(row)}, seeds",
        },
        {
            "type": "scatter", "mode": "markers", "x": [factor * change.mean], "y": [label(row)], "meta": meta,
            "marker": {"size": 12, "symbol": style.symbol.removesuffix("-open"), "color": f"@row:{row}"},
            "error_x": {"type": "data", "array": [None if half is None else factor * half], "visible": half is not None,
                        "color": f"@row:{row}", "thickness": 2, "width": 5},
            "hovertemplate": "mean %{x:+.4~g}<extra></extra>", "name": label(row),
        },
    ]  # fmt: skip


def accuracies(results: Results) -> list[Plot]:
    """A plot per task over tokens, with chance as a dotted line."""
    plots = []
    for task in results.tasks():
        read = partial(curves.along, read=curves.task_score(task), tokens=True)
        traces = _curves(results, results.rows, read, markers=True)
        chance = next(run.tasks[task].get("chance") for run in results.runs if task in run.tasks)
        layout = _axes("training tokens", "accuracy (%)")
        if chance is not None:
            layout["level"] = {"y": 100 * chance, "text": "chance"}
        plots.append(Plot(f"task-{task}", TASKS.get(task, task), "", {"data": traces, "layout": layout}, 300))
    return plots


def pareto(results: Results) -> Plot:
    """Loss against cache bytes: every seed a point, and their mean; lower left is better."""
    drawn = styles([row.name for row in results.rows])
    traces: list[dict[str, Any]] = []
    for row in results.rows:
        size, loss = cost.cache_bytes_per_token(row.config), row.valid_loss
        meta: dict[str, Any] = {"row": row.name}
        values = list(loss.values.values())
        if len(values) > 1:
            traces.append(
                {
                    "type": "scatter", "mode": "markers", "x": [size] * len(values), "y": values, "meta": meta,
                    "marker": {"size": 6, "symbol": "circle-open", "color": f"@row:{row.name}"},
                    "text": [f"seed {seed}" for seed in loss.values], "name": f"{label(row.name)}, seeds",
                    "hovertemplate": "%{text}: %{y:.4f}<extra></extra>",
                }
            )  # fmt: skip
        traces.append(
            {
                "type": "scatter", "mode": "markers", "x": [size], "y": [loss.mean], "name": label(row.name),
                "marker": {"size": 12, "symbol": drawn[row.name].symbol, "color": f"@row:{row.name}"},
                "meta": {**meta, "label": label(row.name)},
                "hovertemplate": "%{x:,} bytes, %{y:.4f}<extra>" + label(row.name) + "</extra>",
            }
        )  # fmt: skip
    sizes = [trace["x"][0] for trace in traces]
    for trace in traces:  # names stand beside their points: left of the smallest cache's, and of the largest's to fit
        trace["meta"]["side"] = "left" if trace["x"][0] in (min(sizes), max(sizes)) else "right"
    layout = _axes("cache bytes per token, all layers, bfloat16", "validation loss (nats per token)")
    layout["xaxis"]["range"] = [0, 1.15 * max(sizes)]
    layout["hovermode"] = "closest"
    caption = "Towards the lower left: less cache at less loss."
    caption += " Small circles are seeds." if any(len(row.runs) > 1 for row in results.rows) else ""
    return Plot("pareto", "Loss against cache", caption, {"data": traces, "layout": layout}, 420, True)


def rates(results: Results) -> Plot | None:
    """Loss over learning rate, for a sweep."""
    if not results.rates:
        return None
    drawn, traces = styles([row.name for row in results.rows]), []
    for row in results.rows:
        found = [rate for rate in results.rates if rate.row == row.name]
        points = [(rate.lr, value) for rate in found for value in rate.loss.values.values()]
        style = drawn[row.name]
        traces += [
            {
                "type": "scatter", "mode": "markers", "x": [lr for lr, _ in points], "y": [loss for _, loss in points],
                "marker": {"size": 6, "symbol": "circle-open", "color": f"@row:{row.name}"}, "hoverinfo": "skip",
                "name": f"{label(row.name)}, seeds", "meta": {"row": row.name},
            },
            {
                "type": "scatter", "mode": "lines+markers", "x": [rate.lr for rate in found],
                "y": [rate.loss.mean for rate in found], "name": label(row.name), "hovertemplate": "%{y:.4f}",
                "line": {"color": f"@row:{row.name}", "width": 2, "dash": style.dash},
                "marker": {"size": [13 if rate.chosen else 6 for rate in found], "symbol": style.symbol,
                           "color": f"@row:{row.name}"},
                "meta": {"row": row.name, "label": label(row.name)},
            },
        ]  # fmt: skip
    layout = _axes("learning rate", "validation loss (nats per token)")
    layout["xaxis"] |= {"type": "log", "tickvals": sorted({rate.lr for rate in results.rates}), "tickformat": "~g"}
    caption = "Lines join means over seeds; the large mark is the rate each row is compared at."
    return Plot("rates", "Loss over learning rate", caption, {"data": traces, "layout": layout}, 380, True)


def diagnostics(results: Results) -> list[Plot]:
    """What has formed inside, by step and seed; each only where it was measured."""
    looks: list[tuple[str, str, str, str, Callable[[Run], dict[int, float]]]] = [
        ("in-context", "In-context score", "late minus early loss (nats)",
         "Loss at the end of the context minus loss near its beginning: lower means the context helps more.",
         curves.in_context),
        ("induction", "Induction score", "first minus second copy (nats)",
         "How much better a random sequence is predicted when it comes again: it rises as induction heads form.",
         curves.induction),
        ("previous-token", "Attention to the previous token", "largest weight of any head",
         "The strongest previous-token head, the first half of an induction circuit.", curves.previous_token),
        ("key-scale", "Scale of content keys over queries", "RMS of k over RMS of q",
         "Mean over layers. One is the scale the paper's initialisation aims at.", curves.key_scale),
    ]  # fmt: skip
    plots = []
    for name, title, unit, caption, read in looks:
        traces = _curves(results, results.rows, partial(curves.along, read=read), markers=True)
        if traces:
            layout = _axes("training step", unit)
            plots.append(Plot(name, title, caption, {"data": traces, "layout": layout}))
    return plots


def positions(results: Results) -> Plot | None:
    rows = [row for row in results.rows if row.name != results.baseline]
    traces = _curves(results, rows, lambda row: curves.by_position(results, row), markers=True)
    if not traces:
        return None
    base = label(results.baseline)
    layout = _axes("position in the context (tokens)", f"validation loss minus {base}'s (nats)", zero=base)
    title = "Where in the context the difference lies"
    return Plot("positions", title, "At the end of training.", {"data": traces, "layout": layout})


def decode_speed(path: Path) -> Plot:
    """Measured decode attention against FlashAttention-3 on GQA's cache, from the last run in a benchmark's table."""
    with path.open(newline="") as file:
        table = list(csv.DictReader(file))
    needed = ("B", "T", "H", "G", "d_h", "d_r", "values", "bytes", "speedup", "byte_ratio", "gpu", "date", "commit")
    missing = [name for name in needed if not table or name not in table[0]]
    if missing:
        raise ValueError(f"{path}: no column {', '.join(missing)}; give the file that gva bench decode --csv writes")
    last = [row for row in table if all(row[k] == table[-1][k] for k in ("gpu", "date", "commit"))]
    plain = [row for row in last if row.get("ragged") != "True" and row.get("S", "1") == "1"]
    if not plain:
        raise ValueError(f"{path}: its last run has no row of one token per sequence and equal lengths to show")
    series: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in plain:
        series.setdefault((row["values"], row["d_h"]), []).append(row)
    traces = []
    for (values, width), rows in sorted(series.items()):
        shapes = [f"B={r['B']} T={r['T']} H={r['H']} G={r['G']} d_r={r['d_r']}" for r in rows]
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": f"{values}, d_h={width}", "text": shapes,
                "x": [int(row["bytes"]) / 2**20 for row in rows], "y": [float(row["speedup"]) for row in rows],
                "hovertemplate": "%{text}<br>%{y:.2f}x<extra></extra>", "meta": {"row": None},
                "marker": {"size": 10, "symbol": "circle" if width == "64" else "diamond", "opacity": 0.85,
                           "color": "@accent" if values == "bf16" else "@second"},
            }
        )  # fmt: skip
    layout = _axes("cache read per step (MiB)", "speed-up", level={"y": 1, "text": "GQA"})
    layout["xaxis"] |= {"type": "log", "tickformat": "~g"}
    layout |= {"showlegend": True, "hovermode": "closest"}
    ratio = max(float(row["byte_ratio"]) for row in plain)
    where = f"{plain[-1]['gpu']}, {plain[-1]['date']}"
    caption = f"{where}: the attention of one decode step. The bytes saved allow up to {ratio:.2f}x."
    title = "GVA's kernel against FlashAttention-3 on GQA's cache"
    return Plot("decode", title, caption, {"data": traces, "layout": layout}, 400, True)


def shared_kv(results: Results) -> Plot | None:
    """The paper's figure of its first cut, where both are there."""
    wanted = [row for row in results.rows if row.name in ("gqa", "shared-kv", "shared-kv-qnorm")]
    if len(wanted) < 2 or "gqa" not in [row.name for row in wanted]:
        return None
    caption = "One vector as both key and value halves the cache of GQA."
    return training_loss(results, wanted, "shared-kv", "Shared KV against GQA", caption)


def final_loss(results: Results) -> Plot | None:
    return forest(results, valid_loss, "loss-forest", "Final validation loss", "nats per token")


def final_accuracy(results: Results) -> Plot | None:
    if not results.tasks():
        return None
    return forest(results, results.average, "accuracy-forest", "Average accuracy", "percentage points", 100)
