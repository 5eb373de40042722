"""The page: one HTML file that needs nothing else, no network among it.

Plotly draws it: well kept, MIT, and its PyPI wheel carries the script, so nothing is fetched when a page is made or
opened and nothing minified lies in this repository. The wheel has the full bundle only, 4.8 MB; compressed it is 1.5,
and every browser since 2023 unpacks gzip itself (DecompressionStream). Without it the tables are still there.
"""

import base64
import functools
import gzip
import json
import re
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import gva
from gva import cost
from gva.report import panels, tables
from gva.report.panels import Plot
from gva.report.scale import figure
from gva.report.style import label, palette, styles
from gva.report.tables import Table, plain
from gva.study.results import Results

HEADLINES = ("gva", "gva-drope-16")  # the row that key numbers are about, the first that is there


def page(results: Results, decode_csv: Path | None = None) -> str:
    """The whole page as text. Raises ModuleNotFoundError where plotly is not installed."""
    library = plotly_script()
    sections = _sections(results, decode_csv)
    rows = results.names
    plots = [plot for _, _, content in sections for plot in content if isinstance(plot, Plot)]
    data = {
        "palette": palette(rows),
        "plots": {p.name: {"figure": p.figure, "height": p.height, "views": list(p.views.values())} for p in plots},
    }
    values = {
        "title": escape(_title(results)),
        "style": _read("page.css"),
        "palette": _css_palette(rows),
        "header": _header(results),
        "chips": _chips(results),
        "sections": "\n".join(_section(*section) for section in sections),
        "footer": f"gva {escape(gva.__version__)} · the numbers behind this page lie beside it as CSV, its tables as "
        "report.md",
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "script": _read("page.js"),
        "library": library,
    }
    # In one pass: what is put in is not looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: values[mark[1]], _read("page.html"))


@functools.cache
def plotly_script() -> str:
    """Plotly's script, gzip in base64. The time stamp is left out: the same runs give the same page."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def markdown(results: Results) -> str:
    """The tables and what must be said with them."""
    shown = {
        "Validation loss": tables.loss_table(results),
        "Accuracy": tables.accuracy_table(results),
        "Cache and parameters": tables.cost_table(results),
        "Learning rates": tables.rates_table(results),
        "Decode speed": tables.speed_table(results),
    }
    parts = [f"# {plain(_title(results))}", plain(_subtitle(results))]
    parts += [f"**{plain(caution)}**"] if (caution := tables.caution(results)) else []
    parts += [f"> {plain(note)}" for note in results.notes]
    parts += [f"## {title}\n\n{table.markdown(plain)}" for title, table in shown.items() if table]
    parts += ["## Attention and scale", "![](attention-scale.svg)", "![](attention-joint-scale.svg)"]
    return "\n\n".join(parts) + "\n"


def _read(name: str) -> str:
    return (files("gva.report") / name).read_text(encoding="utf-8")


# ---- sections: a title, a sentence, and plots or HTML ----

Section = tuple[str, str, list[Plot | str]]


def _sections(results: Results, decode_csv: Path | None) -> list[Section]:
    """Those that have something to show, in the paper's order."""
    found: list[Section] = []

    def add(title: str, text: str, *content: Plot | Table | str | None) -> None:
        shown = [item.html() if isinstance(item, Table) else item for item in content if item is not None]
        if shown:
            _level(shown)
            found.append((title, text, shown))

    caption = "The same data in the same order for every row under one seed."
    whole = panels.training_loss(results, results.rows, "training-loss", "Training loss", caption)
    loss = panels.forest(results, tables.valid_loss, "loss-forest", "Final validation loss", "nats per token")
    add("Loss", "", whole, panels.loss_gap(results), loss, tables.loss_table(results))
    add("Shared KV", "The paper's first cut: no key at all.", panels.shared_kv(results))
    title, unit = "Average accuracy", "percentage points"
    average = panels.forest(results, results.average, "accuracy-forest", title, unit, 100)
    add("Accuracy", "", tables.accuracy_table(results), average, *panels.accuracies(results))
    add("Cache and parameters", "", panels.pareto(results), _bars(results), tables.cost_table(results))
    add("Learning rates", "", panels.rates(results), tables.rates_table(results))
    kernel = None if decode_csv is None else panels.decode_speed(decode_csv)
    add("Decode speed", "", tables.speed_table(results), kernel)
    add("Inside the models", "", *panels.diagnostics(results), panels.positions(results))
    add(
        "Why the initial scale matters",
        "Ten positions, random queries and keys. If keys start far below queries, attention is flat; far above, it is "
        "nearly one-hot. Equal scales alone do not help where both are too small or too large.",
        f'<figure class="card wide">{figure("scale")}<figcaption>Keys at, below and above the scale of queries. Each '
        "map has its own colour scale.</figcaption></figure>",
        f'<figure class="card wide">{figure("joint-scale")}<figcaption>Queries and keys scaled together.</figcaption>'
        "</figure>",
    )
    add("Runs", "", _provenance(results))
    return found


def _section(title: str, text: str, content: list[Plot | str]) -> str:
    said = f"<p>{escape(text)}</p>" if text else ""
    body = "".join(_plot(item) if isinstance(item, Plot) else _card(item) for item in content)
    name = title.lower().replace(" ", "-")
    return f'<section id="{escape(name)}"><h2>{escape(title)}</h2>{said}<div class="grid">{body}</div></section>'


def _level(content: list[Plot | str]) -> None:
    """Half-wide plots that stand side by side are equally high; one left alone takes the whole width."""
    for narrow, found in groupby(content, lambda item: isinstance(item, Plot) and not item.wide):
        beside: list[Any] = list(found) if narrow else []
        for left, right in zip(beside[::2], beside[1::2], strict=False):
            left.height = right.height = max(left.height, right.height)
        if len(beside) % 2:
            beside[-1].wide = True


def _card(html: str) -> str:
    return html if html.startswith("<figure") else f'<div class="card wide">{html}</div>'


def _plot(plot: Plot) -> str:
    buttons = "".join(
        f'<button type="button" data-view="{i}"{" aria-pressed=true" if i == 0 else ""}>{escape(name)}</button>'
        for i, name in enumerate(plot.views)
    )
    views = f'<div class="views">{buttons}</div>' if buttons else ""
    caption = f"<figcaption>{escape(plot.caption)}</figcaption>" if plot.caption else ""
    return (
        f'<figure class="card{" wide" if plot.wide else ""}" data-plot="{escape(plot.name)}">'
        f'<div class="head"><h3>{escape(plot.title)}</h3>{views}</div>{caption}'
        f'<div class="plot" style="height:{plot.height}px"></div></figure>'
    )


# ---- the top of the page ----


def _title(results: Results) -> str:
    if len(results.rows) > 3:
        return f"{len(results.rows)} attentions compared"
    others = " and ".join(label(row.name) for row in results.rows if row.name != results.baseline)
    return f"{others} against {label(results.baseline)}" if others else label(results.baseline)


def _subtitle(results: Results) -> str:
    row = results.row(results.baseline)
    run = row.runs[0]
    sizes = sorted(cost.parameters(other.config)["total"] for other in results.rows)
    seeds = sorted({len(other.runs) for other in results.rows})
    count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    parts = [
        f"{_amount(sizes[0])} to {_amount(sizes[-1])} parameters" if sizes[0] != sizes[-1] else _amount(sizes[0]),
        f"{_amount(run.tokens)} training tokens each",
        f"{count} {'seed' if seeds[-1] == 1 else 'seeds'}",
    ]
    return " · ".join([*parts, *([results.data] if results.data else [])])


def _amount(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"


def _header(results: Results) -> str:
    caution = tables.caution(results)
    first, _, rest = caution.partition(": ")
    banner = f'<p class="banner"><b>{escape(first)}{":" if rest else ""}</b> {escape(rest)}</p>' if caution else ""
    notes = "<br>".join(map(escape, results.notes))
    notes = f'<p class="banner quiet">{notes}</p>' if notes else ""
    return (
        f"<p class=kicker>Grouped Value Attention</p><h1>{escape(_title(results))}</h1>"
        f"<p class=subtitle>{escape(_subtitle(results))}</p>"
        f"{banner}{notes}<div class=numbers>{_key_numbers(results)}</div>{_told(results)}"
    )


def _key_numbers(results: Results) -> str:
    """Three or four numbers about the row that the comparison is about."""
    others = [row for row in results.rows if row.name != results.baseline]
    if not others:
        return ""
    row = next((row for name in HEADLINES for row in others if row.name == name), others[-1])
    base, name = label(results.baseline), label(row.name)
    baseline = results.row(results.baseline)
    saved = tables.cache_bytes(row) / tables.cache_bytes(baseline) - 1
    size = cost.parameters(row.config)["total"] / cost.parameters(baseline.config)["total"] - 1
    cells = [(f"{tables.signed(100 * saved, 1)}%", f"cache per token, {name} against {base}", "counted")]
    for read, digits, factor, unit in ((tables.valid_loss, 3, 1.0, "nats of validation loss"),
                                       (results.average, 2, 100.0, "points of average accuracy")):  # fmt: skip
        change = results.against_baseline(row, read)
        if change is not None:
            shown = tables.difference(change, digits, factor)
            mean, _, interval = shown.partition(" [")
            said = tables.verdict(change)
            said = f"95% interval [{interval}: {said}" if interval else said
            cells.append((mean, f"{unit}, {name} against {base}", said))
    cells.append((f"{tables.signed(100 * size, 1)}%", f"parameters, {name} against {base}", "counted"))
    return "".join(
        f"<div><strong>{escape(number)}</strong><span>{escape(what)}</span><em>{escape(how)}</em></div>"
        for number, what, how in cells
    )


def _told(results: Results) -> str:
    """From three seeds on: which rows an interval sets apart from the baseline, and which it does not."""
    changes = {row.name: results.against_baseline(row, tables.valid_loss) for row in results.rows}
    known = {name: change for name, change in changes.items() if change is not None and change.told_apart is not None}
    if not known:
        return ""
    said = {
        "lower": "lower validation loss than",
        "higher": "higher validation loss than",
        "not told apart": "validation loss not told apart from that of",
    }
    items = "".join(
        f"<li><b>{said[verdict]} {escape(label(results.baseline))}:</b> {escape(', '.join(names))}</li>"
        for verdict in said
        if (names := [label(name) for name, change in known.items() if tables.verdict(change) == verdict])
    )
    each = f"At 95% for each row by itself, not corrected for comparing {len(known)} rows." if len(known) > 1 else ""
    return f'<ul class="told">{items}</ul>' + (f'<p class="note">{each}</p>' if each else "")


def _chips(results: Results) -> str:
    """The legend of all panels: a click hides a row everywhere."""
    drawn = styles(results.names)
    return "".join(
        f'<button type="button" class="chip" data-row="{escape(row.name)}" aria-pressed="true" '
        f'style="--c:var(--row-{tables.css_name(row.name)})"><i class="{drawn[row.name].dash}"></i>'
        f"{escape(label(row.name))}</button>"
        for row in results.rows
    )


def _css_palette(rows: list[str]) -> str:
    """The palette as CSS variables: by the reader's system, unless the page was told otherwise."""
    colors = palette(rows)

    def variables(theme: str) -> str:
        return "".join(
            f"--{'row-' + tables.css_name(name[4:]) if name.startswith('row:') else name}:{value};"
            for name, value in colors[theme].items()
        )

    return (
        f":root{{{variables('light')}color-scheme:light}}"
        f"@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{variables('dark')}color-scheme:dark}}}}"
        f":root[data-theme=dark]{{{variables('dark')}color-scheme:dark}}"
    )


# ---- pieces of HTML ----


def _bars(results: Results) -> str:
    """Cache and parameters as bars, to be seen before the table is read."""

    def group(title: str, read: Any, show: Any) -> str:
        values = {row.name: read(row) for row in results.rows}
        bars = "".join(
            f'<div class="bar" data-row="{escape(name)}"><span>{escape(label(name))}</span>'
            f'<i style="--c:var(--row-{tables.css_name(name)});--w:{100 * value / max(values.values()):.2f}%"></i>'
            f"<b>{escape(show(value))}</b></div>"
            for name, value in values.items()
        )
        return f"<h3>{escape(title)}</h3>{bars}"

    cache = group("Cache bytes per token", tables.cache_bytes, lambda value: f"{value:,}")
    weights = group("Parameters without embeddings", tables.parameters_without_embeddings, _amount)
    return f'<figure class="card bars">{cache}</figure><figure class="card bars">{weights}</figure>'


def _provenance(results: Results) -> str:
    run = results.row(results.baseline).runs[0]
    recipe, data = run.identity["recipe"], run.identity["data"]
    facts = {
        "data": results.data or "—",
        "fingerprints": f"train {data['train']}, validation {data['valid']}",
        "recipe": ", ".join(f"{k}={v}" for k, v in recipe.items() if k not in ("seed", "lr")),
        "versions": "; ".join(sorted({", ".join(f"{k} {v}" for k, v in r.versions.items()) for r in results.runs})),
        "runs": ", ".join(f"{row.name} (seeds {', '.join(map(str, row.seeds))})" for row in results.rows),
        "left out": ", ".join(results.unfinished) or "none",
    }
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()) + "</dl>"
