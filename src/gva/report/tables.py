"""The tables of a report: shown ones as HTML and Markdown, and the numbers behind them as CSV."""

import csv
import io
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

    def markdown(self, written: Callable[[str], str] = str) -> str:
        """`written` makes Markdown of a text: `plain` of what may be another's, while ours stays as it is."""
        lines = [_line(self.header, written), _line(["---", *["---:"] * (len(self.header) - 1)])]
        lines += [_line([f"· {cells[0]}" if seed else cells[0], *cells[1:]], written) for _, seed, cells in self.rows]
        return "\n".join(lines) + (f"\n\n{written(self.note)}" if self.note else "")

    def html(self) -> str:
        head = "".join(f"<th>{escape(text)}</th>" for text in self.header)
        body = []
        for row, seed, cells in self.rows:
            swatch = "" if seed else f'<i class="swatch" style="--c:var(--row-{css_name(row)})"></i>'
            first = f"<th>{swatch}{escape(cells[0])}</th>"
            rest = "".join(f"<td>{escape(text)}</td>" for text in cells[1:])
            body.append(f'<tr{" class=seed" if seed else ""} data-row="{escape(row)}">{first}{rest}</tr>')
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        return f'<div class="scroll">{table}</div>{note}'


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
    against = label(results.baseline)
    header = ["", "seeds", "learning rate", "validation loss", "bits per byte", f"against {against}", "at 95%"]
    rows = []
    for row in results.rows:
        change = results.against_baseline(row, valid_loss)
        bits = row.measure(lambda run: run.last_eval["bits_per_byte"])
        cells = [label(row.name), str(len(row.runs)), f"{row.lr:g}", spread(row.valid_loss, 4)]
        cells += [spread(bits, 4) if bits else "", difference(change, 4) if change else "—", verdict(change) or "—"]
        rows.append((row.name, False, cells))
    others, tokens = len(results.rows) - 1, results.runs[0].last_eval["valid_tokens"]
    note = (
        f"Nats per token on the same {tokens:,} held-out tokens at the end of training, mean ± standard deviation over "
        "seeds. Differences are paired by seed; the interval is Student's, from three seeds on, for each row by itself"
        + (f" (not corrected for comparing {others} rows)" if others > 1 else "")
        + ". It covers the seeds, not the choice of text."
    )
    return Table(header, rows, note)


def accuracy_table(results: Results) -> Table | None:
    """The paper's table, in percent, with every seed below its row's mean; None where no task was evaluated."""
    tasks = results.tasks()
    if not tasks:
        return None
    names = {task: TASKS.get(task, task) for task in tasks}
    header = ["", *names.values(), "Avg.", f"against {label(results.baseline)}", "at 95%"]
    rows: list[tuple[str, bool, list[str]]] = []
    for row in results.rows:
        found = [row.measure(lambda run, task=task: _score(run, task)) for task in tasks]  # type: ignore[misc]
        average, change = row.measure(results.average), results.against_baseline(row, results.average)
        cells = [spread(e, 2, 100) if e else "" for e in [*found, average]]
        told = [difference(change, 2, 100), verdict(change)] if change else ["—", "—"]
        rows.append((row.name, False, [label(row.name), *cells, *told]))
        for run in row.runs if len(row.runs) > 1 else []:
            each = [_score(run, task) for task in tasks] + [results.average(run)]
            numbers = ["" if x is None else f"{100 * x:.2f}" for x in each]
            rows.append((row.name, True, [f"seed {run.seed}", *numbers, "", ""]))
    counts = [max(results.items(task)) for task in tasks]
    items = ", ".join(f"{n:,} {name}" for n, name in zip(counts, names.values(), strict=True))
    if len(set(counts)) == 1:
        items = f"{counts[0]:,} of each task"
    plain = [name for task, name in names.items() if all(r.get("acc_norm") is None for r in results.scored(task))]
    note = (
        "Zero-shot accuracy in percent at the end of training, mean ± standard deviation over seeds; length-normalised"
        + (f" except {', '.join(plain)}" if plain else "")
        + f". Items: {items}; the intervals cover the seeds, not the choice of items. {_yardsticks(results, tasks)}"
        "Avg. is the unweighted mean of the tasks. No entry is marked best: the last columns tell what can be told."
    )
    return Table(header, rows, note)


def _yardsticks(results: Results, tasks: list[str]) -> str:
    """What guessing scores, and how far items alone move one accuracy: below these a difference says nothing."""
    told = ""
    scored = [results.scored(task) for task in tasks]
    chance = [found[0]["chance"] for found in scored if found[0].get("chance") is not None]
    if len(chance) == len(tasks):
        each = ", ".join(f"{100 * value:.2f}" for value in chance)
        told += f"Guessing scores {each}; {100 * sum(chance) / len(chance):.2f} on average. "
    errors = ", ".join(f"{100 * max(map(standard_error, found)):.2f}" for found in scored)
    return told + f"Standard errors over items: {errors} at most. "


def _score(run: Run, task: str) -> float | None:
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
    return Table(header, rows, "Counted from each row's config, the cache in bfloat16 over all layers.")


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
    if not results.rates:
        return None
    rows = [
        (r.row, False, [label(r.row), f"{r.lr:g}", str(r.loss.n), spread(r.loss, 4), "chosen" if r.chosen else ""])
        for r in results.rates
    ]
    note = (
        "Each row is compared at the rate with its lowest mean validation loss, chosen on the seeds and text it is "
        "compared on, which flatters all a little."
    )
    return Table(["", "learning rate", "seeds", "validation loss", ""], rows, note)


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
    if few and (len(few) < len(seeds) or not all(seeds.values())):
        return (
            f"Not ranked: {', '.join(few)}, for want of three seeds in common with {label(results.baseline)}; "
            "differences are taken under one seed."
        )
    if min(seeds.values()) == 1:
        return (
            f"One {toy}seed ranks nothing: with the next seed the rows may stand in another order and at other "
            "distances. Three seeds or more give intervals."
        )
    if min(seeds.values()) == 2:
        return "Two seeds show a spread but give no interval, so nothing here is ranked. Three or more do."
    return ""


# ---- the numbers ----


def csv_text(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def run_rows(results: Results) -> list[dict[str, Any]]:
    evaluated = ("valid_loss", "bits_per_byte", "valid_tokens", "in_context_score")
    return [
        {
            "row": row.name, "seed": run.seed, "lr": run.lr, "steps": run.steps, "tokens": run.tokens,
            **{name: run.last_eval[name] for name in evaluated},
            "average_accuracy": results.average(run), "tokens_per_second": run.tokens_per_second, **run.versions,
        }
        for row in results.rows
        for run in row.runs
    ]  # fmt: skip


def difference_rows(results: Results) -> list[dict[str, Any]]:
    """Every row against the baseline: one line per measure, and every seed in a column of its own."""
    measures: dict[str, Any] = {"valid_loss": valid_loss}
    if results.tasks():
        measures["average_accuracy"] = results.average
        measures |= {task: lambda run, task=task: _score(run, task) for task in results.tasks()}
    rows = []
    for measure, read in measures.items():
        for row in results.rows:
            if (change := results.against_baseline(row, read)) is None:
                continue
            low, high = change.interval or (None, None)
            rows.append(
                {
                    "measure": measure, "row": row.name, "baseline": results.baseline, "seeds": change.n,
                    "mean": change.mean, "spread": change.spread, "low": low, "high": high,
                    "told_apart": change.told_apart, **{f"seed_{seed}": value for seed, value in change.values.items()},
                }
            )  # fmt: skip
    return rows


def accuracy_rows(results: Results) -> list[dict[str, Any]]:
    return [
        {"row": row.name, "seed": run.seed, "step": line["step"], "tokens": line["tokens"], "task": task, **values}
        for row in results.rows
        for run in row.runs
        for line in run.of_kind("tasks")
        for task, values in line["results"].items()
    ]


def cost_rows(results: Results) -> list[dict[str, Any]]:
    return [
        {
            "row": row.name,
            "cache_scalars_per_token_per_layer": cost.cache_scalars_per_token_per_layer(row.config),
            "cache_bytes_per_token": cache_bytes(row),
            "parameters": cost.parameters(row.config)["total"],
            "parameters_without_embeddings": parameters_without_embeddings(row),
        }
        for row in results.rows
    ]


def speed_rows(results: Results) -> list[dict[str, Any]]:
    return [
        {
            "row": row.name,
            **{name: value for name, value in line.items() if name not in ("kind", "step")},
            "against_baseline": results.speed_against_baseline(line),
        }
        for row in results.rows
        for line in row.speeds
    ]


def rate_rows(results: Results) -> list[dict[str, Any]]:
    return [
        {"row": r.row, "lr": r.lr, "seeds": r.loss.n, "mean": r.loss.mean, "spread": r.loss.spread, "chosen": r.chosen}
        for r in results.rates
    ]
