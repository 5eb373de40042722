"""The top of the page: what was compared, what came out of it, and the legend of all panels."""

from html import escape

from gva import cost
from gva.report import about, tables
from gva.report.style import FAMILIES, MANY, Style, label, styles
from gva.study.results import ComparedRow, Results

HEADLINES = ("gva", "gva-one-group", "gva-drope-16")  # the row that key numbers are about, the first that is there


def title(results: Results) -> str:
    if len(results.rows) > 3:
        return f"{len(results.rows)} rows compared"
    others = " and ".join(label(row.name) for row in results.rows if row.name != results.baseline)
    return f"{others} against {label(results.baseline)}" if others else label(results.baseline)


def subtitle(results: Results) -> str:
    seeds = sorted({len(row.runs) for row in results.rows})
    count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    tokens = about.amount(results.row(results.baseline).runs[0].tokens)
    parts = [
        f"{about.parameters(results)} parameters",
        f"{tokens} training tokens" + (" each" if len(results.runs) > 1 else ""),
        f"{count} {'seed' if seeds[-1] == 1 else 'seeds'}",
    ]
    return " · ".join(parts)


def headline(results: Results) -> ComparedRow | None:
    """The row that the comparison is about: one that is known for it, else the first of ours, else the last."""
    others = [row for row in results.rows if row.name != results.baseline]
    known = [row for name in HEADLINES for row in others if row.name == name]
    ours = [row for row in others if row.config.attention == "gva"]
    return next(iter([*known, *ours, *others[-1:]]), None)


def header(results: Results) -> str:
    told = _told(results)  # which names those that are not ranked, where others are
    caution = "" if told else tables.caution(results)
    first, _, rest = caution.partition(": ")
    banner = f'<p class="banner"><b>{escape(first)}{":" if rest else ""}</b> {escape(rest)}</p>' if caution else ""
    return (
        f"<p class=kicker>Grouped Value Attention</p><h1>{escape(title(results))}</h1>"
        f"<p class=subtitle>{escape(subtitle(results))}</p>"
        f"{banner}<div class=numbers>{_key_numbers(results)}</div>{told}"
    )


def _key_numbers(results: Results) -> str:
    """Three or four numbers about the row that the comparison is about; of one row alone, what it is and has."""
    row = headline(results)
    cells = _alone(results) if row is None else _compared(results, row)
    return "".join(
        f"<div><strong>{escape(number)}</strong><span>{escape(what)}</span><em>{escape(how)}</em></div>"
        for number, what, how in cells
    )


def _alone(results: Results) -> list[tuple[str, str, str]]:
    (row,) = results.rows
    seeds = f"mean of {len(row.runs)} seeds" if len(row.runs) > 1 else "measured"
    bits = row.measure(lambda run: run.last_eval["bits_per_byte"])
    cells = [(f"{row.valid_loss.mean:.3f}", "nats per token, validation loss", seeds)]
    cells += [(f"{bits.mean:.3f}", "bits per byte of the same text", seeds)] if bits else []
    cells += [(f"{tables.cache_bytes(row):,}", "bytes of cache per token, in bfloat16", "counted")]
    return [*cells, (about.parameters(results), "parameters", "counted")]


def _compared(results: Results, row: ComparedRow) -> list[tuple[str, str, str]]:
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
    return [*cells, (f"{tables.signed(100 * size, 1)}%", f"parameters, {name} against {base}", "counted")]


def _told(results: Results) -> str:
    """From three seeds on: which rows an interval sets apart from the baseline, and which it does not."""
    changes = {row.name: results.against_baseline(row, tables.valid_loss) for row in results.rows}
    known = {name: change for name, change in changes.items() if change is not None and change.told_apart is not None}
    if not known:
        return ""
    few = [label(row.name) for row in results.rows if row.name not in known and row.name != results.baseline]
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
    items += f"<li><b>not ranked, for want of three seeds in common:</b> {escape(', '.join(few))}</li>" if few else ""
    return f'<ul class="told">{items}</ul><p class="note">At 95% {escape(tables.uncorrected(known.values()))}.</p>'


def legend(results: Results) -> str:
    """The rows by family: a name picks a row out in all panels, its box hides it everywhere. Folded where they are
    many; the script folds it on a narrow window too."""
    if len(results.rows) == 1:
        return ""
    drawn = styles(results.rows)
    families: dict[str, str] = {}
    for row in results.rows:
        families[drawn[row.name].family] = families.get(drawn[row.name].family, "") + _entry(row.name, drawn[row.name])
    many = len(results.rows) > MANY
    groups = "".join(
        f'<div class="family"><h4>{escape(FAMILIES[key].name)}</h4>{entries}</div>' for key, entries in families.items()
    )
    return (
        f'<details class="legend{" many" if many else ""}"{"" if many else " open"}>'
        f'<summary>{len(results.rows)} rows<span id="picked"></span></summary>'
        f'<div class="families">{groups}</div></details>'
    )


def _entry(row: str, style: Style) -> str:
    name = escape(label(row))
    return (
        f'<div class="entry" data-row="{escape(row)}" style="--c:var(--row-{tables.css_name(row)})">'
        f'<input type="checkbox" class="shown" checked aria-label="show {name}">'
        f'<button type="button" class="pick" aria-pressed="false"><i class="{style.dash}"></i>{name}'
        f"<small>{style.number}</small></button></div>"
    )
