"""The pictures of a report as Plotly figures: plain dicts, colours by name, so that the page can paint both themes."""

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gva import cost
from gva.report import curves
from gva.report.curves import Curve, Reader
from gva.report.style import MANY, Style, drawn, label, styles
from gva.study.results import ComparedRow, Results
from gva.study.runs import TASKS, Run
from gva.study.statistics import Estimate

SETTLED = 0.1  # the share of a run that is left out of view at first, its losses being far above the rest
Ranges = dict[str, list[float]]  # by axis


@dataclass
class Plot:
    """One picture: `figure` has data and layout; `views` name ranges of axes, None for all there is, that buttons show,
    the one at `view` first."""

    name: str
    title: str
    caption: str
    figure: dict[str, Any]
    height: int = 340
    wide: bool = False
    views: dict[str, Ranges | None] = field(default_factory=dict)
    view: int = 0


def _wide(rows: list[ComparedRow]) -> dict[str, Any]:
    """Lines of many rows need the whole width, for their names."""
    return {"wide": len(rows) > MANY, "height": 440 if len(rows) > MANY else 340}


def _axes(x: str, y: str, **layout: Any) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}, **layout}


def _lines(row: str, style: Style, found: list[Curve], markers: bool = False) -> list[dict[str, Any]]:
    """Every seed as a thin line, the mean as a thick one that carries the label; with one seed, that one alone."""
    traces = []
    for curve in found[1:] if len(found) == 2 else found:
        mean = curve.seed is None
        name = drawn(row) if mean else f"{drawn(row)}, seed {curve.seed}"
        traces.append(
            {
                "type": "scatter", "mode": "lines+markers" if markers and mean else "lines", "x": curve.x, "y": curve.y,
                "name": name, "opacity": 1 if mean else 0.32, "hoverinfo": None if mean else "skip",
                "hovertemplate": "%{y:.4~g}" if mean else None,
                "line": {"color": f"@row:{row}", "width": 2.2 if mean else 1, "dash": style.dash},
                "marker": {"size": 6, "symbol": style.symbol, "color": f"@row:{row}"},
                "meta": {"row": row, "label": drawn(row) if mean else None, "seed": not mean},
            }
        )  # fmt: skip
    return traces


def _curves(
    results: Results, rows: Iterable[ComparedRow], read: Callable[[ComparedRow], list[Curve]], markers: bool = False
) -> list[dict[str, Any]]:
    looks = styles(results.rows)
    return [trace for row in rows for trace in _lines(row.name, looks[row.name], read(row), markers)]


def _late(traces: list[dict[str, Any]], start: float, also: Iterable[float]) -> Ranges | None:
    """The ranges that show what comes after that share of a run, and what else must be seen."""
    last = max(x for trace in traces for x in trace["x"])
    late = [y for t in traces for x, y in zip(t["x"], t["y"], strict=True) if x > start * last]
    if not late:
        return None
    late += also
    room = 0.04 * (max(late) - min(late) or 1.0)
    x = [start * last, 1.01 * last] if start > SETTLED else [0, 1.01 * last]
    return {"xaxis": x, "yaxis": [min(late) - room, max(late) + room]}


def _over_a_run(plot: Plot, rows: int, also: Iterable[float] = ()) -> Plot:
    """A plot of losses: without the steep part of the run, with buttons for the whole and for where rows part."""
    views: dict[str, Ranges | None] = {"whole run": None}
    for name, start in ((f"after the first {SETTLED:.0%}", SETTLED), ("second half", 0.5)):
        if (found := _late(plot.figure["data"], start, also)) is not None:
            views[name] = found
    plot.views = dict(reversed(views.items())) if len(views) > 1 else {}
    plot.view = int(rows <= MANY and len(views) > 2)
    return plot


def training_loss(results: Results, rows: list[ComparedRow], name: str, title: str, caption: str) -> Plot:
    traces = _curves(results, rows, lambda row: curves.along(row, curves.training_loss))
    layout = _axes("training step", "training loss (nats per token)")
    width = curves.stretch(rows[0].runs[0])
    averaged = f" Each point averages {width} logged steps." if width > 1 else ""
    plot = Plot(name, title, (caption + averaged).strip(), {"data": traces, "layout": layout}, 440, True)
    return _over_a_run(plot, len(rows))


def valid_loss(results: Results) -> Plot:
    """Validation loss over tokens, with losses of others as lines where there are any."""
    traces = _curves(results, results.rows, partial(curves.along, read=curves.valid_loss, tokens=True), markers=True)
    layout = _axes("training tokens", "validation loss (nats per token)")
    layout["levels"] = [{"y": y, "text": drawn(name)} for name, y in results.references]
    caption = "On text held out from training."
    if any(len(row.runs) > 1 for row in results.rows):
        caption += " Thin lines are seeds, the thick one is their mean."
    plot = Plot("valid-loss", "Validation loss", caption, {"data": traces, "layout": layout}, 440, True)
    return _over_a_run(plot, len(results.rows), [y for _, y in results.references])


def _gap(results: Results, read: Reader, name: str, title: str, x: str, caption: str) -> Plot | None:
    """Every row's validation loss minus the baseline's."""
    rows = [row for row in results.rows if row.name != results.baseline]
    traces = _curves(results, rows, lambda row: curves.gap(results, row, read), markers=True)
    base = drawn(results.baseline)
    layout = _axes(x, f"validation loss minus {base}'s (nats)", levels=[{"y": 0, "text": base}])
    return Plot(name, title, caption, {"data": traces, "layout": layout}, **_wide(results.rows)) if traces else None


def loss_gap(results: Results) -> Plot | None:
    base = label(results.baseline)
    caption = f"Below the line is better than {base} under the same seed."
    if any(len(row.runs) > 1 for row in results.rows if row.name != results.baseline):
        caption += " Thin lines are seeds, the thick one is their mean."
    title = f"Distance to {base} while training"
    return _gap(results, curves.valid_loss, "gap", title, "training step", caption)


def forest(
    results: Results, read: Callable[[Run], float | None], name: str, title: str, unit: str, factor: float = 1.0
) -> Plot | None:
    """Each row's difference to the baseline: every seed a point, the mean with its interval."""
    looks = styles(results.rows)
    found = {row.name: change for row in reversed(results.rows) if (change := results.against_baseline(row, read))}
    if not found:
        return None
    traces = [trace for row, change in found.items() for trace in _forest_row(row, looks[row], change, factor)]
    base = drawn(results.baseline)
    layout = _axes(f"{unit}, minus {base}'s", "", zero_x=base, hovermode="closest")
    layout["yaxis"] |= {"categoryorder": "array", "categoryarray": [*map(drawn, found)], "automargin": True}
    caption = "Under the same seed." if len(found) > 1 else "Under the same seed as the reference."
    if any(change.n > 1 for change in found.values()):
        caption = "Every small mark is a seed, paired with the same seed of the reference; the large one is their mean"
        intervals = any(change.interval for change in found.values())
        caption += ", the bar its 95% interval." if intervals else ". No interval: too few seeds, or all alike."
    height = max(220, 120 + 38 * len(found))
    return Plot(name, title, caption, {"data": traces, "layout": layout}, height, len(found) > MANY)


def _forest_row(row: str, style: Style, change: Estimate, factor: float) -> list[dict[str, Any]]:
    values, half = [factor * value for value in change.values.values()], change.half_width
    seeds = _seeds(row, x=values, y=[drawn(row)] * len(values), hovertemplate="%{text}: %{x:+.4~g}<extra></extra>")
    seeds["text"] = [f"seed {seed}" for seed in change.values]
    seeds["marker"] |= {"size": 7, "line": {"width": 1.4}}
    mean = {
        "type": "scatter", "mode": "markers", "x": [factor * change.mean], "y": [drawn(row)], "meta": {"row": row},
        "marker": {"size": 12, "symbol": style.symbol.removesuffix("-open"), "color": f"@row:{row}"},
        "error_x": {"type": "data", "array": [None if half is None else factor * half], "visible": half is not None,
                    "color": f"@row:{row}", "thickness": 2, "width": 5},
        "hovertemplate": "mean %{x:+.4~g}<extra></extra>", "name": drawn(row),
    }  # fmt: skip
    return [seeds, mean]


def _seeds(row: str, **given: Any) -> dict[str, Any]:
    """A row's seeds as small circles."""
    marker = {"size": 6, "symbol": "circle-open", "color": f"@row:{row}"}
    name, meta = f"{drawn(row)}, seeds", {"row": row, "seed": True}
    return {"type": "scatter", "mode": "markers", "name": name, "marker": marker, "meta": meta, **given}


def accuracies(results: Results) -> list[Plot]:
    """A plot per task over tokens, with chance as a dotted line."""
    plots = []
    for task in results.tasks():
        read = partial(curves.along, read=curves.task_score(task), tokens=True)
        traces = _curves(results, results.rows, read, markers=True)
        chance = results.scored(task)[0].get("chance")
        layout = _axes("training tokens", "accuracy (%)")
        if chance is not None:
            layout["levels"] = [{"y": 100 * chance, "text": "chance"}]
        figure = {"data": traces, "layout": layout}
        plots.append(Plot(f"task-{task}", TASKS.get(task, task), "", figure, **_wide(results.rows)))
    return plots


def pareto(results: Results) -> Plot | None:
    """Loss against cache bytes: every seed a point, and their mean; lower left is better."""
    if len(results.rows) < 2:
        return None
    looks = styles(results.rows)
    traces: list[dict[str, Any]] = []
    for row in results.rows:
        size, loss = cost.cache_bytes_per_token(row.config), row.valid_loss
        if loss.n > 1:
            text, shown = [f"seed {seed}" for seed in loss.values], "%{text}: %{y:.4f}<extra></extra>"
            values = list(loss.values.values())
            traces.append(_seeds(row.name, x=[size] * loss.n, y=values, text=text, hovertemplate=shown))
        traces.append(
            {
                "type": "scatter", "mode": "markers", "x": [size], "y": [loss.mean], "name": drawn(row.name),
                "marker": {"size": 12, "symbol": looks[row.name].symbol, "color": f"@row:{row.name}"},
                "meta": {"row": row.name, "label": drawn(row.name)},
                "hovertemplate": "%{x:,} bytes, %{y:.4f}<extra>" + drawn(row.name) + "</extra>",
            }
        )  # fmt: skip
    x = "cache bytes per token, all layers, bfloat16"
    layout = _axes(x, "validation loss (nats per token)", hovermode="closest")
    caption = "Towards the lower left: less cache at less loss."
    caption += " Small circles are seeds." if any(len(row.runs) > 1 for row in results.rows) else ""
    return Plot("pareto", "Loss against cache", caption, {"data": traces, "layout": layout}, 480, True)


def rates(results: Results) -> Plot | None:
    """Loss over learning rate, for a sweep."""
    if not results.rates:
        return None
    traces = []
    for row, style in styles(results.rows).items():
        found = [rate for rate in results.rates if rate.row == row]
        tried = [rate.lr for rate in found for _ in rate.loss.values]
        losses = [loss for rate in found for loss in rate.loss.values.values()]
        traces += [
            _seeds(row, x=tried, y=losses, hoverinfo="skip"),
            {
                "type": "scatter", "mode": "lines+markers", "x": [rate.lr for rate in found],
                "y": [rate.loss.mean for rate in found], "name": drawn(row), "hovertemplate": "%{y:.4f}",
                "line": {"color": f"@row:{row}", "width": 2, "dash": style.dash},
                "marker": {"size": [13 if rate.chosen else 6 for rate in found], "symbol": style.symbol,
                           "color": f"@row:{row}"},
                "meta": {"row": row, "label": drawn(row)},
            },
        ]  # fmt: skip
    layout = _axes("learning rate", "validation loss (nats per token)")
    layout["xaxis"] |= {"type": "log", "tickvals": sorted({rate.lr for rate in results.rates}), "tickformat": "~g"}
    caption = "Lines join means over seeds; the large mark is the rate each row is compared at."
    return Plot("rates", "Loss over learning rate", caption, {"data": traces, "layout": layout}, 380, True)


def diagnostics(results: Results) -> list[Plot]:
    """What has formed inside, by step and seed; each only where it was measured."""
    looks: list[tuple[str, str, str, str, Reader]] = [
        ("in-context", "In-context score", "late minus early loss (nats)",
         "Loss at the end of the context minus loss near its beginning: lower means the context helps more.",
         curves.in_context),
        ("induction", "Induction score", "first minus second copy (nats)",
         "How much better a random sequence is predicted when it comes again: it rises as induction heads form.",
         curves.induction),
        ("previous-token", "Attention to the previous token", "largest weight of any head",
         "The strongest previous-token head, the first half of an induction circuit.", curves.previous_token),
        ("key-scale", "Scale of content keys over queries", "RMS of k over RMS of q",
         "Mean over all layers but the first, which the next panel has. The paper's initialisation aims at one.",
         curves.key_scale),
    ]  # fmt: skip
    plots = []
    for name, title, unit, caption, read in looks:
        traces = _curves(results, results.rows, partial(curves.along, read=read), markers=True)
        if traces:
            layout = _axes("training step", unit)
            plots.append(Plot(name, title, caption, {"data": traces, "layout": layout}, **_wide(results.rows)))
    if traces := _curves(results, results.rows, partial(curves.along, read=curves.key_scale_by_layer), markers=True):
        title, caption = "Scale of content keys over queries, by layer", "At the end of training, from the first layer."
        layout = _axes("layer", "RMS of k over RMS of q", levels=[{"y": 1, "text": "equal"}])
        layout["xaxis"] |= {"dtick": 1}
        figure = {"data": traces, "layout": layout}
        plots.append(Plot("key-scale-layers", title, caption, figure, **_wide(results.rows)))
    return plots


def positions(results: Results) -> Plot | None:
    title, x = "Where in the context the difference lies", "position in the context (tokens)"
    return _gap(results, curves.by_position, "positions", title, x, "At the end of training.")


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
    levels = [{"y": 1, "text": "GQA"}]
    layout = _axes("cache read per step (MiB)", "speed-up", levels=levels, showlegend=True, hovermode="closest")
    layout["xaxis"] |= {"type": "log", "tickformat": "~g"}
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
