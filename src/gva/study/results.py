"""Finished runs read back from their folders, merged over machines, and only if they may be compared."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

from gva.config import GvaConfig
from gva.errors import check
from gva.run.folder import differences
from gva.study.runs import TASKS, Run, read_runs, score, speed_conditions
from gva.study.statistics import Estimate, paired
from gva.train.recipe import identity_defaults

# What two runs of one row may differ in, and what two rows may, being what is compared or recorded beside it.
_SEED = ("recipe.seed",)
_ROW = ("recipe.seed", "recipe.lr", "model.")


class NotComparable(ValueError):
    """Runs that a table must not put side by side; says which and why."""


@dataclass(frozen=True)
class ComparedRow:
    """A row and its runs; in a sweep, those at its own best learning rate."""

    name: str
    runs: list[Run]
    speeds: list[dict[str, Any]] = field(default_factory=list)  # of decoding, as `gva.study.speed` measured them

    @property
    def config(self) -> GvaConfig:
        return self.runs[0].config

    @property
    def lr(self) -> float:
        return self.runs[0].lr

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    def measure(self, read: Callable[[Run], float | None]) -> Estimate | None:
        """One number per run that has it; None if no run has."""
        values = {run.seed: value for run in self.runs if (value := read(run)) is not None}
        return Estimate(values) if values else None

    @property
    def valid_loss(self) -> Estimate:
        return Estimate({run.seed: run.valid_loss for run in self.runs})


@dataclass(frozen=True)
class Rate:
    """One learning rate of a swept row."""

    row: str
    lr: float
    loss: Estimate
    chosen: bool


@dataclass
class Results:
    rows: list[ComparedRow]
    baseline: str
    rates: list[Rate] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)  # what a reader must know before comparing, beside `differing`
    data: str = ""  # what the runs were trained on, where known
    differing: dict[str, list[str]] = field(default_factory=dict)  # by row: what is otherwise than the baseline's
    references: list[tuple[str, float]] = field(default_factory=list)  # losses to see ours against: a name, nats

    @property
    def notes(self) -> list[str]:
        """All of it as sentences, rows that differ in more than the attention among it."""
        more = f"differs from {self.baseline} in more than the attention"
        return [*self.told, *(f"{row} {more}: {', '.join(parts)}." for row, parts in self.differing.items())]

    def row(self, name: str) -> ComparedRow:
        return next(row for row in self.rows if row.name == name)

    @property
    def names(self) -> list[str]:
        return [row.name for row in self.rows]

    @property
    def runs(self) -> list[Run]:
        return [run for row in self.rows for run in row.runs]

    def tasks(self) -> list[str]:
        """The tasks that every row has a run for, on as many items, in the paper's order; others after them."""
        found = [set().union(*(run.tasks for run in row.runs)) for row in self.rows]
        common = {task for task in set.intersection(*found) if len(self.items(task)) == 1}
        return [name for name in TASKS if name in common] + sorted(common - TASKS.keys())

    def items(self, task: str) -> set[int]:
        """How many items of a task the runs were scored on at their end: one number, if they compare."""
        return {result["items"] for result in self.scored(task)}

    def scored(self, task: str) -> list[dict[str, Any]]:
        """What every run that was scored on a task has at its end."""
        return [run.tasks[task] for run in self.runs if task in run.tasks]

    def average(self, run: Run) -> float | None:
        """The unweighted mean accuracy of a run over the common tasks."""
        tasks = self.tasks()
        if not tasks or any(task not in run.tasks for task in tasks):
            return None
        return sum(score(run.tasks[task]) for task in tasks) / len(tasks)

    def against_baseline(self, row: ComparedRow, read: Callable[[Run], float | None]) -> Estimate | None:
        """The difference of a row to the baseline, paired by seed; None for the baseline itself or where unknown."""
        ours, theirs = row.measure(read), self.row(self.baseline).measure(read)
        if row.name == self.baseline or ours is None or theirs is None:
            return None
        return paired(ours.values, theirs.values)

    def speed_against_baseline(self, line: dict[str, Any]) -> float | None:
        """How many times the baseline's tokens per second this is; None where that was not measured alike."""
        for other in self.row(self.baseline).speeds:
            if "reason" not in line and speed_conditions(other) == speed_conditions(line):
                return line["tokens_per_second"] / other["tokens_per_second"]
        return None


def load(folders: Iterable[Path], baseline: str | None = None, needed: bool = True) -> Results:
    """The comparison of all finished runs under these folders, as one machine or several left them.

    Without a finished run of `baseline` it is refused, or where that is not `needed`, taken against another and told.
    """
    runs: dict[tuple[str, int], Run] = {}
    unfinished: set[tuple[str, int]] = set()
    unusable: dict[tuple[str, int], str] = {}
    order: dict[str, tuple[int, int]] = {}  # the first folder that has a row, then its place in the matrix
    for place, folder in enumerate(folders):
        check(folder.is_dir(), "FOLDER", str(folder), "no such folder; give one that gva compare or gva train wrote")
        for run in read_runs(folder):
            key = (run.row, run.seed)
            order.setdefault(run.of, (place, run.order))
            if not run.of_kind("done"):
                unfinished.add(key)
            elif run.unusable:
                unusable[key] = run.unusable
            elif key in runs and runs[key].folder.resolve() != run.folder.resolve():
                _refuse_twice(runs[key], run)
                runs[key] = max(runs[key], run, key=lambda copy: len(copy.lines))  # one may have been scored since
            else:
                runs[key] = run
    given = ", ".join(map(str, folders))
    lost = {key: why for key, why in sorted(unusable.items()) if key not in runs}
    told = [f"{row}:{seed} is left out: {why}." for (row, seed), why in lost.items()]
    if not runs:
        why = " ".join(told) or "run gva compare again, it goes on where it was"
        raise NotComparable(f"{given}: no finished run; {why}")
    found = [runs[key] for key in sorted(runs)]
    _refuse_mixture(found)
    rows, rates, told_of_rates = _rows_at_their_rate(found, sorted(order, key=lambda name: (order[name], name)))
    told += told_of_rates
    names = [row.name for row in rows]
    if baseline is not None and baseline not in names and needed:
        raise ValueError(f"baseline={baseline!r}: no finished run of it, only of {names}")
    chosen = baseline if baseline in names else "gqa" if "gqa" in names else names[0]
    if baseline not in (None, chosen):
        told.append(f"There is no finished run of {baseline} here: differences are taken against {chosen}.")
    missing = sorted(f"{row}:{seed}" for row, seed in unfinished - runs.keys())
    data = next((run.data for run in found if run.data), "")
    results = Results(rows, chosen, rates, missing, told, data, _differing(rows, chosen), _teachers(found))
    results.told += _what_is_uneven(results)
    return results


def _teachers(runs: list[Run]) -> list[tuple[str, float]]:
    """The validation loss of each teacher before training, once."""
    lines = {line.get("fingerprint"): line for run in runs for line in run.of_kind("teacher")}
    return [(f"teacher {line.get('name', '')}".strip(), line["valid_loss"]) for line in lines.values()]


def _refuse_twice(a: Run, b: Run) -> None:
    """The same run copied to two places is fine; two different runs under one name are not."""
    if differences(a.identity, b.identity, identity_defaults()) or a.valid_loss != b.valid_loss:
        raise NotComparable(
            f"{a.folder} and {b.folder} are both {a.row} seed {a.seed}, and differ; leave one of them out"
        )


def _refuse_mixture(runs: list[Run]) -> None:
    """Raise NotComparable for different data, different validation sets, or one row trained in two ways."""
    first = runs[0]
    for run, split in product(runs[1:], ("train", "valid")):
        theirs, ours = (one.identity["data"][split] for one in (first, run))
        if theirs != ours:
            raise NotComparable(
                f"{first.folder} and {run.folder} have different {split} data (fingerprints {theirs} and {ours}): not "
                "a comparison; make two reports, or train both on one prepared folder"
            )
    counts = {line["valid_tokens"]: run.folder for run in runs for line in run.of_kind("eval")}
    if len(counts) > 1:
        (a, folder_a), (b, folder_b) = list(counts.items())[:2]
        raise NotComparable(
            f"{folder_a} was validated on {a:,} tokens and {folder_b} on {b:,}: their losses do not compare; train "
            "with the same length and eval_sequences"
        )
    by_row: dict[str, Run] = {}
    for run in runs:
        other = by_row.setdefault(run.row, run)
        changed = [n for n in differences(other.identity, run.identity, identity_defaults()) if n not in _SEED]
        if changed:
            raise NotComparable(
                f"{other.folder} and {run.folder} are both called {run.row} but differ in {', '.join(changed)}; "
                "rename the folder of one row"
            )


def _rows_at_their_rate(runs: list[Run], order: list[str]) -> tuple[list[ComparedRow], list[Rate], list[str]]:
    """Each row with its runs; a swept one with those at its best rate by mean validation loss."""
    rows, rates, notes, tried = [], [], [], {}
    for name in order:
        ours = [run for run in runs if run.of == name]
        if not ours:
            continue
        candidates = [ComparedRow(name, list(found)) for _, found in groupby(ours, lambda run: run.row)]
        swept = sorted(candidates, key=lambda row: row.lr)
        losses = [row.valid_loss for row in swept]
        usual, able = _choosable(losses)
        best = min(able, key=lambda i: losses[i].over(usual).mean)
        rows.append(replace(swept[best], speeds=_speeds(run for row in swept for run in row.runs)))
        tried[name] = len(swept)
        if len(swept) == 1 and ours[0].row == name:
            continue
        rates += [Rate(name, row.lr, row.valid_loss, i == best) for i, row in enumerate(swept)]
        if len(able) > 2 and best in (0, len(swept) - 1):
            notes.append(f"{name} did best at the edge of its sweep ({swept[best].lr:g}): widen it that way.")
        if len(able) < len(swept):
            notes.append(f"{name}: some rates have fewer seeds than others and could not be chosen.")
        if any(losses[i].n > len(usual) for i in able):
            told = ", ".join(map(str, sorted(usual)))
            notes.append(f"{name}: its rate was chosen on the seeds that most of its rates have ({told}).")
    if len(set(tried.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in tried.items())
        notes.append(f"Rows are at the best of different numbers of learning rates ({told}): more rates, more luck.")
    return rows, rates, notes


def _choosable(losses: list[Estimate]) -> tuple[set[int], list[int]]:
    """The seeds that most rates have, and the rates that have all of them: a sweep that is not finished chooses among
    what is, and more seeds at the best rate do not rule out the others. Two rates have no majority; the fuller wins.
    """
    counts = Counter(seed for loss in losses for seed in loss.values)
    usual = {seed for seed, count in counts.items() if 2 * count > len(losses) or len(losses) == 2}
    if not usual or not any(usual <= set(loss.values) for loss in losses):
        usual = set(max(losses, key=lambda loss: loss.n).values)
    return usual, [i for i, loss in enumerate(losses) if usual <= set(loss.values)]


def _speeds(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """One line for everything a row was measured on; where it was on nothing, the reason, if there is one."""
    lines = [line for run in runs for line in run.of_kind("decode")]
    measured = {speed_conditions(line): line for line in lines if "reason" not in line}
    return list(measured.values()) or lines[-1:]


def _differing(rows: list[ComparedRow], baseline: str) -> dict[str, list[str]]:
    """What differs between each row and the baseline besides the attention."""
    base, found = next(row for row in rows if row.name == baseline).runs[0], {}
    for row in rows:
        changed = differences(base.identity, row.runs[0].identity, identity_defaults())
        if None not in changed.get("weights.from", [None]):  # each begins from its own, which is what is compared
            changed.pop("weights.from")
        told = [f"{k.split('.')[1]} {a} → {b}" for k, (a, b) in changed.items() if not k.startswith(_ROW)]
        told += [f"lr {a:g} → {b:g}" for k, (a, b) in changed.items() if k == "recipe.lr"]
        size = [k for k in changed if k.startswith("model.") and k.split(".")[1] in _SIZE]
        if {"mha", "mqa"} & {base.config.attention, row.config.attention}:  # their groups are what they are
            size = [k for k in size if k != "model.num_value_groups"]
        told += [f"{k.split('.')[1]} {changed[k][0]} → {changed[k][1]}" for k in size]
        if told:
            found[row.name] = told
    return found


def _what_is_uneven(results: Results) -> list[str]:
    """Sentences about what is not alike in all runs, and what is missing."""
    notes = []
    for package in sorted({name for run in results.runs for name in run.versions}):
        versions = sorted({run.versions.get(package, "unknown") for run in results.runs})
        if len(versions) > 1:
            notes.append(f"The runs were made with different versions of {package}: {', '.join(versions)}.")
    counts = sorted({len(row.runs) for row in results.rows})
    if len(counts) > 1:
        notes.append(f"Rows have from {counts[0]} to {counts[-1]} seeds; differences use the seeds both rows have.")
    for run in results.runs:
        if run.damaged:
            kinds = ", ".join(run.damaged)
            notes.append(f"{run.row}:{run.seed}: lines of its metrics ({kinds}) are damaged, and left out.")
    if results.unfinished:
        notes.append(f"Not finished, and left out: {', '.join(results.unfinished)}.")
    return notes + _task_notes(results)


def _task_notes(results: Results) -> list[str]:
    """Sentences about accuracies that do not compare: between rows, or along a run."""
    notes, compared = [], results.tasks()
    for task in sorted({task for run in results.runs for task in run.tasks}):
        counts = ", ".join(f"{n:,}" for n in sorted(results.items(task)))
        lines = [line["results"] for run in results.runs for line in run.of_kind("tasks")]
        along = {found[task]["items"] for found in lines if task in found}
        if task not in compared:
            why = f"on different numbers of items ({counts})" if len(results.items(task)) > 1 else "for some rows only"
            notes.append(f"{TASKS.get(task, task)} was scored {why}, and is left out.")
        elif along != results.items(task):
            notes.append(f"{TASKS.get(task, task)} was scored on {counts} items at the end, on others along the way.")
    return notes


_SIZE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_value_groups",
    "value_head_dim", "vocab_size", "rope_theta", "rope_parameters", "initializer_range", "tie_word_embeddings",
)  # fmt: skip
