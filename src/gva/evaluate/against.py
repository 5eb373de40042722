"""Two checkpoints on the same items. What each got right is kept item by item, so that their difference has its own
error: most items are easy or hard for both, and that cancels."""

import hashlib
import json
import math
import re
import statistics
from pathlib import Path

from gva.errors import check
from gva.evaluate.results import METRICS, is_right
from gva.evaluate.tasks import Item, Task
from gva.run.files import read_object
from gva.text import aligned

Answers = dict[str, dict[str, str]]  # by task: a 0 or 1 for each item and metric, and a fingerprint of the items


def answers(task: Task, items: list[Item], found: list[list[float]]) -> dict[str, str]:
    asked = json.dumps([[item.pairs, item.gold] for item in items])
    told = {"items": hashlib.sha256(asked.encode()).hexdigest()[:16]}
    for metric in METRICS if task.normalised else METRICS[:1]:
        right = (is_right(item, scores, metric) for item, scores in zip(items, found, strict=True))
        told[metric] = "".join("01"[one] for one in right)
    return told


def read_answers(path: Path) -> Answers:
    """Of what `gva eval --out` wrote."""
    remedy = "give a file that gva eval wrote with --out, on tasks and by the engine own"
    found = read_object(path, remedy).get("answers")
    check(isinstance(found, dict) and bool(found), "against", str(path), f"has no answers in it; {remedy}")
    assert isinstance(found, dict)
    for task, told in found.items():
        fine = isinstance(told, dict) and all(isinstance(value, str) for value in told.values())
        fine = fine and all(re.fullmatch("[01]+", told[metric]) for metric in METRICS if metric in told)
        check(fine and {"items", "acc"} <= told.keys(), "against", str(path), f"{task} is damaged; {remedy}")
    return found


def compare(ours: Answers, theirs: Answers) -> dict[str, dict[str, float]]:
    """Ours less theirs by task, and of the average over tasks; acc_norm is acc where a task has none."""
    found: dict[str, dict[str, float]] = {}
    for task in ours:
        check(task in theirs, "against", task, f"was not scored there, only {sorted(theirs)}; score the same --tasks")
        same = ours[task]["items"] == theirs[task]["items"]
        check(same, "against", task, "was scored on other items there; give both the same data and --limit")
        pairs = {m: (ours[task].get(m, ours[task]["acc"]), theirs[task].get(m, theirs[task]["acc"])) for m in METRICS}
        found[task] = {}
        for metric, (a, b) in pairs.items():
            apart = [int(one) - int(other) for one, other in zip(a, b, strict=True)]
            error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
            found[task] |= {metric: statistics.mean(apart), f"{metric}_stderr": error}
    if len(found) > 1:
        rows = list(found.values())
        found["average"] = {metric: statistics.mean(row[metric] for row in rows) for metric in METRICS}
        for key in (f"{metric}_stderr" for metric in METRICS):
            found["average"][key] = math.hypot(*(row[key] for row in rows)) / len(rows)
    return found


def told(found: dict[str, dict[str, float]], name: str) -> str:
    """As a table, in points."""
    lines = [[f"less {name}", "acc", "±", "acc_norm", "±"]]
    for task, row in found.items():
        numbers = [f"{100 * row[metric]:+.2f}" for metric in METRICS]
        errors = [f"{100 * row[f'{metric}_stderr']:.2f}" for metric in METRICS]
        lines.append([task, numbers[0], errors[0], numbers[1], errors[1]])
    return "\n".join(aligned(lines))
