"""Loglikelihoods to accuracies: the numbers of a task, their average over tasks, a table."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gva.errors import check_finite
from gva.evaluate.tasks import Item, Task
from gva.text import aligned

METRICS = ("acc", "acc_norm")


@dataclass(frozen=True)
class Scored:
    """What an engine found for one task."""

    result: dict[str, Any]  # acc, acc_norm, their standard errors, chance, items
    loglikelihoods: list[list[float]]  # of each item's choices, in nats
    pairs: list[list[tuple[str, str]]]  # the contexts and continuations that were scored
    answers: dict[str, str] = field(default_factory=dict)  # which items were right, where the engine tells


def summarise(task: Task, items: list[Item], found: list[list[float]]) -> dict[str, Any]:
    """acc: the likeliest choice is right. acc_norm: the likeliest per character is; None where
    lm-evaluation-harness defines none (WinoGrande, whose choices are one and the same text)."""
    check_scores(task.name, found)
    summary: dict[str, Any] = {}
    for metric in METRICS:
        if metric == "acc_norm" and not task.normalised:
            summary |= {metric: None, f"{metric}_stderr": None}
            continue
        right = [is_right(item, scores, metric) for item, scores in zip(items, found, strict=True)]
        summary |= {metric: sum(right) / len(right), f"{metric}_stderr": _standard_error(right)}
    chance = sum(1 / len(item.pairs) for item in items) / len(items)
    return summary | {"chance": chance, "items": len(items)}


def check_scores(task: str, found: list[list[float]]) -> None:
    """Refuse accuracies of a model that gives no numbers: the first choice would count as the likeliest."""
    what = f"{task}: a loglikelihood is"
    check_finite(what, (x for item in found for x in item), "the model's weights are damaged, or its training diverged")


def is_right(item: Item, scores: list[float], metric: str) -> bool:
    """Whether the right choice is the likeliest, per character for acc_norm."""
    lengths = np.array(item.lengths if metric == "acc_norm" else [1] * len(scores), float)
    return int(np.argmax(np.array(scores) / lengths)) == item.gold


def _standard_error(right: list[bool]) -> float | None:
    """Of the mean, from the sample's own spread; of one item there is none."""
    n, mean = len(right), sum(right) / len(right)
    return math.sqrt(mean * (1 - mean) / (n - 1)) if n > 1 else None


def average(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Unweighted means over tasks; in that of acc_norm, a task without one counts with its acc."""
    rows = results.values()
    normalised = [row["acc"] if row["acc_norm"] is None else row["acc_norm"] for row in rows]
    named = {"acc": [row["acc"] for row in rows], "acc_norm": normalised, "chance": [row["chance"] for row in rows]}
    return {name: sum(values) / len(values) for name, values in named.items()}


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results in percent, aligned, with the average as the last row."""
    lines = [["task", "acc", "±", "acc_norm", "±", "chance", "items"]]
    for name, row in results.items():
        numbers = [row["acc"], row["acc_stderr"], row["acc_norm"], row["acc_norm_stderr"], row["chance"]]
        lines.append([name, *map(_percent, numbers), f"{row['items']:,}"])
    if len(results) > 1:
        mean = average(results)
        numbers = [_percent(mean[name]) for name in ("acc", "acc_norm", "chance")]
        lines.append(["average", numbers[0], "", numbers[1], "", numbers[2], ""])
    text = aligned(lines)
    if any(row["acc_norm"] is None for row in results.values()):
        text.append("-: not defined by lm-evaluation-harness; the average of acc_norm takes acc there")
    return "\n".join(text)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def differences(one: dict[str, Scored], other: dict[str, Scored]) -> dict[str, dict[str, Any]]:
    """How far two engines are apart on each task: the largest difference of any choice's loglikelihood, how many
    choices were compared, and whether text, acc and acc_norm are the same."""
    found = {}
    for name in one:
        a, b = one[name], other[name]
        flat = [np.array([x for item in scored.loglikelihoods for x in item]) for scored in (a, b)]
        found[name] = {
            "largest_difference": float(np.abs(flat[0] - flat[1]).max()),
            "loglikelihoods": len(flat[0]),
            "same_text": a.pairs == b.pairs,
            **{f"same_{metric}": a.result[metric] == b.result[metric] for metric in METRICS},
        }
    return found
