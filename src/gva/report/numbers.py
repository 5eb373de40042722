"""The numbers behind a report, as rows of CSV files."""

import csv
import io
from typing import Any

from gva import cost
from gva.report.tables import cache_bytes, parameters_without_embeddings, task_score, valid_loss
from gva.study.results import Results


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
        measures |= {task: lambda run, task=task: task_score(run, task) for task in results.tasks()}
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
