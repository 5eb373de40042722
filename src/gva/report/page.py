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
from gva.report import about, header, panels, tables
from gva.report.panels import Plot
from gva.report.scale import figure
from gva.report.style import MANY, label, palette, styles
from gva.report.tables import Table, plain
from gva.study.results import Results


def page(results: Results, decode_csv: Path | None = None) -> str:
    """The whole page as text. Raises ModuleNotFoundError where plotly is not installed."""
    library = plotly_script()
    sections = _sections(results, decode_csv)
    plots = [plot for _, _, content in sections for plot in content if isinstance(plot, Plot)]
    lead = header.headline(results)
    looks = styles(results.rows)
    data = {
        "palette": palette(results.rows),
        "plots": {p.name: {"figure": p.figure, "height": p.height, "views": list(p.views.values())} for p in plots},
        "rows": {name: {"label": label(name), "number": style.number} for name, style in looks.items()},
        "baseline": results.baseline,
        "many": MANY,
        "lead": [results.baseline, lead.name] if lead and len(results.rows) > MANY else [],
    }
    values = {
        "title": escape(header.title(results)),
        "style": _read("page.css"),
        "palette": _css_palette(results),
        "header": header.header(results),
        "legend": header.legend(results),
        "sections": "\n".join(_section(*section) for section in sections),
        "footer": f"gva {escape(gva.__version__)} · the numbers behind this page lie beside it as CSV, its tables as "
        "report.md",
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "script": _read("page.labels.js") + _read("page.js"),
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
        "Rows": about.rows_table(results),
        "Accuracy": tables.accuracy_table(results),
        "Cache and parameters": tables.cost_table(results),
        "Learning rates": tables.rates_table(results),
        "Decode speed": tables.speed_table(results),
    }
    parts = [f"# {plain(header.title(results))}", plain(header.subtitle(results))]
    parts += [f"**{plain(caution)}**"] if (caution := tables.caution(results)) else []
    facts = "\n".join(f"- {name}: {plain(text)}" for name, text in about.facts(results).items())
    for title, table in shown.items():
        parts += [f"## {title}\n\n{table.markdown(plain)}"] if table else []
        parts += [facts] if title == "Rows" else []
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

    add("What was compared" if len(results.rows) > 1 else "What was trained", "", about.rows_table(results),
        _list(about.facts(results)))  # fmt: skip
    caption = "The same data in the same order for every row under one seed." if len(results.rows) > 1 else ""
    whole = panels.training_loss(results, results.rows, "training-loss", "Training loss", caption)
    loss = panels.forest(results, tables.valid_loss, "loss-forest", "Final validation loss", "nats per token")
    add("Loss", "", panels.valid_loss(results), whole, panels.loss_gap(results), loss, tables.loss_table(results))
    add("Shared KV", "The paper's first cut: no key at all.", panels.shared_kv(results))
    title, unit = "Average accuracy", "percentage points"
    average = panels.forest(results, results.average, "accuracy-forest", title, unit, 100)
    add("Accuracy", "", tables.accuracy_table(results), average, *panels.accuracies(results))
    bars = _bars(results) if len(results.rows) > 1 else None
    add("Cache and parameters", "", panels.pareto(results), bars, tables.cost_table(results))
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
        f'<button type="button" data-view="{i}"{" aria-pressed=true" if i == plot.view else ""}>{escape(name)}</button>'
        for i, name in enumerate(plot.views)
    )
    views = f'<div class="views">{buttons}</div>' if buttons else ""
    caption = f"<figcaption>{escape(plot.caption)}</figcaption>" if plot.caption else ""
    return (
        f'<figure class="card{" wide" if plot.wide else ""}" data-plot="{escape(plot.name)}">'
        f'<div class="head"><h3>{escape(plot.title)}</h3>{views}</div>{caption}'
        f'<div class="plot" style="height:{plot.height}px"></div></figure>'
    )


def _css_palette(results: Results) -> str:
    """The palette as CSS variables: by the reader's system, unless the page was told otherwise."""
    colors = palette(results.rows)

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
    """The cache as bars, to be seen before the table is read."""
    most = max(map(tables.cache_bytes, results.rows))
    bars = "".join(
        f'<div class="bar" data-row="{escape(row.name)}"><span>{escape(label(row.name))}</span>'
        f'<i style="--c:var(--row-{tables.css_name(row.name)});--w:{100 * tables.cache_bytes(row) / most:.2f}%"></i>'
        f"<b>{tables.cache_bytes(row):,}</b></div>"
        for row in results.rows
    )
    return f'<figure class="card wide"><h3>Cache bytes per token</h3><div class="bars">{bars}</div></figure>'


def _provenance(results: Results) -> str:
    facts = {
        "versions": "; ".join(sorted({", ".join(f"{k} {v}" for k, v in r.versions.items()) for r in results.runs})),
        "runs": "; ".join(f"{row.name} {_seeds(row.seeds)}" for row in results.rows),
        "left out": ", ".join(results.unfinished) or "none",
    }
    return _list(facts)


def _seeds(numbers: list[int]) -> str:
    return f"({'seed' if len(numbers) == 1 else 'seeds'} {about.listed(numbers)})"


def _list(facts: dict[str, str]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()) + "</dl>"
