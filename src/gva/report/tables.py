"""The tables of a report: shown ones as HTML and Markdown, and the numbers behind them as CSV."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from gva import cost
from gva.errors import check
from gva.report.style import label
from gva.study.results import ComparedRow, Results
from gva.study.runs import TASKS, Run, score, standard_error
from gva.study.statistics import FEWEST, Estimate
from gva.text import aligned

OWN_GIB = 2  # a process has less of a GPU beside its tensors; what is above belongs to others


@dataclass(frozen=True)
class Table:
    """Cells are text. `rows` name the row they belong to (for its colour) and whether they are one of its seeds."""

    header: list[str]
    rows: list[tuple[str, bool, list[str]]]
    note: str = ""
    text: tuple[int, ...] = ()  # columns of words: set from the left, and broken where they are long

    def markdown(self, written: Callable[[str], str] = str) -> str:
        """`written` makes Markdown of a text: `plain` of what may be another's, while ours stays as it is."""
        sides = ["---" if i in (0, *self.text) else "---:" for i in range(len(self.header))]
        lines = [_line(self.header, written), _line(sides)]
        lines += [_line([f"· {cells[0]}" if seed else cells[0], *cells[1:]], written) for _, seed, cells in self.rows]
        return "\n".join(lines) + (f"\n\n{written(self.note)}" if self.note else "")

    def html(self) -> str:
        sides = [" class=text" if i in self.text else "" for i in range(len(self.header))]
        head = "".join(f"<th{side}>{escape(text)}</th>" for side, text in zip(sides, self.header, strict=True))
        body = []
        for row, seed, cells in self.rows:
            swatch = "" if seed else f'<i class="swatch" style="--c:var(--row-{css_name(row)})"></i>'
            first = f"<th>{swatch}{escape(cells[0])}</th>"
            rest = "".join(self._cell(i, text) for i, text in enumerate(cells) if i)
            body.append(f'<tr{" class=seed" if seed else ""} data-row="{escape(row)}">{first}{rest}</tr>')
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        return f'<div class="scroll">{table}</div>{note}'

    def _cell(self, column: int, text: str) -> str:
        """A cell knows its header: on a narrow page it stands alone."""
        if column in self.text:
            return f"<td class=text>{escape(text)}</td>"
        return f'<td data-head="{escape(self.header[column])}">{escape(text)}</td>'


def filled(header: list[str], rows: list[tuple[str, bool, list[str]]], note: str = "") -> Table:
    """A table without the columns in which no row has anything: of one row alone, what it is compared with."""
    kept = [i for i in range(len(header)) if i == 0 or any(cells[i] not in ("", "—") for _, _, cells in rows)]
    return Table([header[i] for i in kept], [(row, seed, [cells[i] for i in kept]) for row, seed, cells in rows], note)


def _line(cells: Iterable[str], written: Callable[[str], str] = str) -> str:
    return "| " + " | ".join(written(text).replace("|", "\\|") for text in cells) + " |"


def plain(text: str) -> str:
    """Text as Markdown that shows it in one line: no HTML, no code, no link or picture."""
    return re.sub(r"[\\`*]|(?<=\])[(\[]", r"\\\g<0>", escape(" ".join(text.split()), quote=False))


def fill(text: str, tables: Mapping[str, str]) -> str:
    """A page with what stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->` replaced."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        found = text.count(begin) == text.count(end) == 1 and text.index(begin) < text.index(end)
        check(found, "table", name, f"the page needs one {begin} and after it one {end}")
        text = f"{text.partition(begin)[0]}{begin}\n{table}\n{end}{text.partition(end)[2]}"
    return text


def css_name(row: str) -> str:
    """A row's name as part of a CSS variable's."""
    return "".join(c if c.isalnum() or c in "-_" else f"-{ord(c):x}-" for c in row)


# ---- numbers as text ----


def spread(estimate: Estimate, digits: int, factor: float = 1.0) -> str:
    """Mean and standard deviation over seeds."""
    mean = f"{factor * estimate.mean:.{digits}f}"
    return mean if estimate.spread is None else f"{mean} ± {factor * estimate.spread:.{digits}f}"


def difference(estimate: Estimate, digits: int, factor: float = 1.0) -> str:
    """A paired difference and, from three seeds on, its interval."""
    mean = signed(factor * estimate.mean, digits)
    if estimate.interval is None:
        return mean
    low, high = (signed(factor * end, digits) for end in estimate.interval)
    return f"{mean} [{low}, {high}]"


def signed(value: float, digits: int) -> str:
    """With its sign, a true minus, and no negative zero."""
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else f"{0:.{digits}f}"


def verdict(estimate: Estimate | None) -> str:
    """What the interval allows one to say: never a winner inside the noise."""
    if estimate is None:
        return ""
    if estimate.told_apart is None:
        if estimate.n >= FEWEST:
            return "all seeds alike: open"
        return "one seed: open" if estimate.n == 1 else f"{estimate.n} seeds: open"
    if not estimate.told_apart:
        return "not told apart"
    return "lower" if estimate.mean < 0 else "higher"


def parameters_without_embeddings(row: ComparedRow) -> int:
    parts = cost.parameters(row.config)
    return parts["total"] - parts["embedding"] - parts["lm_head"]


def cache_bytes(row: ComparedRow) -> int:
    return cost.cache_bytes_per_token(row.config)


def valid_loss(run: Run) -> float:
    return run.valid_loss


# ---- shown tables ----


def loss_table(results: Results) -> Table:
    found = {row.name: results.against_baseline(row, valid_loss) for row in results.rows}
    judged = _judged(found.values())
    header = ["", "seeds", "learning rate", "validation loss", "bits per byte", f"against {label(results.baseline)}"]
    rows = []
    for row in results.rows:
        change = found[row.name]
        bits = row.measure(lambda run: run.last_eval["bits_per_byte"])
        cells = [label(row.name), str(len(row.runs)), f"{row.lr:g}", spread(row.valid_loss, 4)]
        cells += [spread(bits, 4) if bits else "", difference(change, 4) if change else "—", verdict(change) or "—"]
        rows.append((row.name, False, cells if judged else cells[:-1]))
    tokens = results.runs[0].last_eval["valid_tokens"]
    note = f"Nats per token on the same {tokens:,} held-out tokens at the end of training{_deviations(results)}."
    if any(found.values()):
        note += f" Differences are {'paired by' if _deviations(results) else 'taken under the same'} seed."
    if judged:
        note += (
            f" The interval is Student's at 95%, from three seeds on, {uncorrected(found.values())}. It covers the "
            "seeds, not the choice of text."
        )
    return filled([*header, "at 95%"] if judged else header, rows, note)


def _judged(found: Iterable[Estimate | None]) -> bool:
    """Whether there is an interval among these differences, or seeds enough for one."""
    return any(change is not None and change.n >= FEWEST for change in found)


def _deviations(results: Results) -> str:
    return ", mean ± standard deviation over seeds" if any(len(row.runs) > 1 for row in results.rows) else ""


def uncorrected(found: Iterable[Estimate | None]) -> str:
    """Intervals of many rows: some would leave out zero by chance."""
    count = sum(change is not None and change.interval is not None for change in found)
    return "for each row by itself" + (f", not corrected for {count} comparisons" if count > 1 else "")


def accuracy_table(results: Results) -> Table | None:
    """The paper's table, in percent, with every seed below its row's mean; None where no task was evaluated."""
    tasks = results.tasks()
    if not tasks:
        return None
    names = {task: TASKS.get(task, task) for task in tasks}
    changes = {row.name: results.against_baseline(row, results.average) for row in results.rows}
    judged = _judged(changes.values())
    last = [f"against {label(results.baseline)}", "at 95%"][: 2 if judged else 1]
    rows: list[tuple[str, bool, list[str]]] = []
    for row in results.rows:
        found = [row.measure(lambda run, task=task: task_score(run, task)) for task in tasks]  # type: ignore[misc]
        average, change = row.measure(results.average), changes[row.name]
        cells = [spread(e, 2, 100) if e else "" for e in [*found, average]]
        told = [difference(change, 2, 100), verdict(change)] if change else ["—", "—"]
        rows.append((row.name, False, [label(row.name), *cells, *told[: len(last)]]))
        for run in row.runs if len(row.runs) > 1 else []:
            each = [task_score(run, task) for task in tasks] + [results.average(run)]
            numbers = ["" if x is None else f"{100 * x:.2f}" for x in each]
            rows.append((row.name, True, [f"seed {run.seed}", *numbers, *[""] * len(last)]))
    counts = [max(results.items(task)) for task in tasks]
    items = ", ".join(f"{n:,} {name}" for n, name in zip(counts, names.values(), strict=True))
    if len(set(counts)) == 1:
        items = f"{counts[0]:,} of each task"
    plain = [name for task, name in names.items() if all(r.get("acc_norm") is None for r in results.scored(task))]
    note = (
        f"Zero-shot accuracy in percent at the end of training{_deviations(results)}; length-normalised"
        + (f" except {', '.join(plain)}" if plain else "")
        + f". Items: {items}. {'The intervals cover the seeds, not the choice of items. ' if judged else ''}"
        + f"{_yardsticks(results, tasks)}Avg. is the unweighted mean of the tasks. No entry is marked best"
        + (": the last columns tell what can be told." if judged else ".")
    )
    return filled(["", *names.values(), "Avg.", *last], rows, note)


def _yardsticks(results: Results, tasks: list[str]) -> str:
    """What guessing scores, and how far items alone move one accuracy: below these a difference says nothing."""
    told = ""
    scored = [results.scored(task) for task in tasks]
    chance = [found[0]["chance"] for found in scored if found[0].get("chance") is not None]
    if len(chance) == len(tasks):
        each = ", ".join(f"{100 * value:.2f}" for value in chance)
        told += f"Guessing scores {each}; {100 * sum(chance) / len(chance):.2f} on average. "
    errors = [[error for result in found if (error := standard_error(result)) is not None] for found in scored]
    if not all(errors):
        return told
    return told + f"Standard errors over items: {', '.join(f'{100 * max(found):.2f}' for found in errors)} at most. "


def task_score(run: Run, task: str) -> float | None:
    return score(run.tasks[task]) if task in run.tasks else None


def cost_table(results: Results) -> Table:
    base = cache_bytes(results.row(results.baseline))
    header = ["", "scalars per token and layer", "cache bytes per token", f"against {label(results.baseline)}"]
    header += ["parameters", "without embeddings"]
    rows = []
    for row in results.rows:
        size = cache_bytes(row)
        cells = [label(row.name), f"{cost.cache_scalars_per_token_per_layer(row.config):,}", f"{size:,}"]
        cells += ["—" if row.name == results.baseline else f"{signed(100 * (size / base - 1), 1)}%"]
        cells += [f"{cost.parameters(row.config)['total']:,}", f"{parameters_without_embeddings(row):,}"]
        rows.append((row.name, False, cells))
    return filled(header, rows, "Counted from each row's config, the cache in bfloat16 over all layers.")


def speed_table(results: Results) -> Table | None:
    """Measured decode speed: a line per row, or several where it was measured on several GPUs."""
    if not any(row.speeds for row in results.rows):
        return None
    header = ["", "tokens/s", "ms per step", f"against {label(results.baseline)}", "cache GiB", "batch × context"]
    header += ["attention through", "GPU"]
    rows = []
    for row in results.rows:
        for line in row.speeds:
            cells = ["—"] * 7 if "reason" in line else _speed_cells(results, row, line)
            rows.append((row.name, False, [label(row.name), *cells]))
    return Table(header, rows, _speed_note(results))


def _speed_cells(results: Results, row: ComparedRow, line: dict[str, Any]) -> list[str]:
    ratio = None if row.name == results.baseline else results.speed_against_baseline(line)
    return [
        f"{line['tokens_per_second']:,.0f}", f"{line['step_ms']:.3f}", "—" if ratio is None else f"{ratio:.2f}×",
        f"{line['cache_bytes'] / 2**30:.2f}", f"{line['batch']:,} × {line['context']:,}", line["attention"],
        line["gpu"],
    ]  # fmt: skip


def _speed_note(results: Results) -> str:
    reasons: dict[str, list[str]] = {}
    measured = []
    for row in results.rows:
        for line in row.speeds:
            if "reason" in line:
                reasons.setdefault(line["reason"], []).append(label(row.name))
            else:
                measured.append((row, line))
    said = []
    if measured:
        versions = ", ".join(sorted({line["torch"] for _, line in measured}))
        said.append(
            "One decode step of the whole model, compiled and captured as a CUDA graph, on a full paged cache: the "
            f"median of its replays. Weights and cache are noise, in {measured[0][1]['dtype']}; torch {versions}."
        )
    if any(row.config.rotates_late for row, _ in measured):
        said.append("Where keys are rebuilt, every step makes those of all tokens, in plain torch.")
    shared = [(label(row.name), line["beside_gib"]) for row, line in measured if line.get("beside_gib", 0) > OWN_GIB]
    if shared:
        held = ", ".join(f"{name} {gib:.0f} GiB" for name, gib in shared)
        said.append(f"Other processes held memory of the GPU meanwhile, and their work may be in the figure: {held}.")
    said += [f"{', '.join(names)} not measured: {reason.rstrip('.')}." for reason, names in reasons.items()]
    return " ".join(said)


def rates_table(results: Results) -> Table | None:
    """A line for each swept row, a column for each rate."""
    if not results.rates:
        return None
    rates = sorted({rate.lr for rate in results.rates})
    found = {(rate.row, rate.lr): rate for rate in results.rates}
    uneven = len({rate.loss.n for rate in results.rates}) > 1
    rows = []
    for name in dict.fromkeys(rate.row for rate in results.rates):
        cells = [label(name)]
        for rate in (found.get((name, lr)) for lr in rates):
            cells.append("" if rate is None else ("▸ " if rate.chosen else "") + spread(rate.loss, 4))
            cells[-1] += f" ({rate.loss.n})" if rate and uneven else ""
        rows.append((name, False, cells))
    seeds = ", in brackets over how many seeds" if uneven else ""
    note = (
        f"Validation loss at each learning rate{seeds}. Each row is compared at the rate with its lowest mean, "
        "marked ▸, chosen on the seeds and text it is compared on, which flatters all a little."
    )
    return Table(["", *(f"{lr:g}" for lr in rates)], rows, note)


def summary_text(results: Results) -> str:
    """The table that ends `gva compare` on a terminal."""
    base = cache_bytes(results.row(results.baseline))
    header = ["row", "parameters", "cache B/token", "cache", "validation loss", f"against {results.baseline}", ""]
    lines = [header]
    for row in results.rows:
        change = results.against_baseline(row, valid_loss)
        size = cache_bytes(row)
        cells = [row.name, f"{cost.parameters(row.config)['total'] / 1e6:.1f}M", f"{size:,}", f"{size / base - 1:+.1%}"]
        cells += [spread(row.valid_loss, 4), difference(change, 4) if change else "", verdict(change)]
        lines.append(cells)
    said = [text for text in (caution(results), *results.notes) if text]
    return "\n".join([*aligned(lines, left=(0, 6)), *([""] if said else []), *said])


def caution(results: Results) -> str:
    """What must be said before any number, where there are too few seeds."""
    if len(results.rows) < 2:
        return "One row alone: there is nothing to compare it with."
    toy = "toy " if cost.parameters(results.rows[0].config)["total"] < 2e7 else ""
    others = [row for row in results.rows if row.name != results.baseline]
    seeds = {row.name: change.n if (change := results.against_baseline(row, valid_loss)) else 0 for row in others}
    few = [label(name) for name, count in seeds.items() if count < FEWEST]
    counts = sorted(set(seeds.values()))
    if len(few) == len(seeds) > 1 and len(counts) > 1:
        return (
            f"Nothing here is ranked: rows have {counts[0]} to {counts[-1]} seeds in common with "
            f"{label(results.baseline)}. Three or more give intervals."
        )
    if few and (len(few) < len(seeds) or counts == [0]):
        return (
            f"Not ranked: {', '.join(few)}, for want of three seeds in common with {label(results.baseline)}; "
            "differences are taken under one seed."
        )
    if counts[0] == 1:
        return (
            f"One {toy}seed ranks nothing: with the next seed the rows may stand in another order and at other "
            "distances. Three seeds or more give intervals."
        )
    if counts[0] == 2:
        return "Two seeds show a spread but give no interval, so nothing here is ranked. Three or more do."
    return ""
