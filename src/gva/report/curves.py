"""Numbers along a run, ready to draw: thinned where there are too many, averaged over seeds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gva.study.results import ComparedRow, Results
from gva.study.runs import Run, score

BINS = 200  # points of a curve: more cannot be seen, and the page stays small
Reader = Callable[[Run], dict[int, float]]  # of one number of a run, by step


@dataclass(frozen=True)
class Curve:
    """x and y of one run, or of the mean over seeds where `seed` is None."""

    seed: int | None
    x: list[float]
    y: list[float]


def training_loss(run: Run) -> dict[int, float]:
    """Loss by step: the mean of each of at most BINS equal stretches of logged steps, under the stretch's last."""
    lines = run.of_kind("step")
    width = stretch(run)
    return {
        lines[i + len(part) - 1]["step"]: sum(part) / len(part)
        for i in range(0, len(lines), width)
        if (part := [line["loss"] for line in lines[i : i + width]])
    }


def stretch(run: Run) -> int:
    """How many logged steps a point of the training-loss curve averages; a kept run has fewer of them."""
    logged = len(run.of_kind("step"))
    points = min(BINS, max(40, logged // 5))
    return max(1, -(-logged // points))


def events(kind: str, read: Callable[[dict[str, Any]], float | None]) -> Reader:
    """A reader of one number by step from the lines of a kind."""

    def by_step(run: Run) -> dict[int, float]:
        # A line recorded after the run stands at the end of its file, whatever its step.
        lines = sorted(run.of_kind(kind), key=lambda line: line["step"])
        found = [(line["step"], value) for line in lines if (value := read(line)) is not None]
        every = -(-len(found) // BINS) or 1
        return dict(reversed(found[::-1][::every]))  # counted from the end, so that the last one is always there

    return by_step


def task_score(task: str) -> Reader:
    return events("tasks", lambda line: 100 * score(line["results"][task]) if task in line["results"] else None)


valid_loss = events("eval", lambda line: line["valid_loss"])
in_context = events("eval", lambda line: line.get("in_context_score"))
# How much better a random sequence is predicted the second time: nothing but copying from the context helps there.
induction = events("diagnostics", lambda line: line["first_copy_loss"] - line["second_copy_loss"])
previous_token = events("diagnostics", lambda line: max(max(layer) for layer in line["previous_token_attention"]))


def _key_scales(line: dict[str, Any]) -> dict[int, float]:
    """RMS of content keys over that of queries, by layer from 1 on."""
    scales = enumerate(line["qk_scales"], 1)
    return {layer: s["k_nope"] / s["q_nope"] for layer, s in scales if s["k_nope"] is not None and s["q_nope"]}


def _key_scale(line: dict[str, Any]) -> float | None:
    """Their mean over the layers but the first, which is far from the others and would hide in it."""
    scales = _key_scales(line)
    later = [scale for layer, scale in scales.items() if layer > 1] or list(scales.values())
    return sum(later) / len(later) if later else None


key_scale = events("diagnostics", _key_scale)
first_key_scale = events("diagnostics", lambda line: _key_scales(line).get(1))


def key_scale_by_layer(run: Run) -> dict[int, float]:
    last = max(run.of_kind("diagnostics"), key=lambda line: line["step"], default=None)
    return _key_scales(last) if last else {}


def along(row: ComparedRow, read: Reader, tokens: bool = False) -> list[Curve]:
    """The curve of every seed and their mean; `tokens` counts x in tokens, not steps."""
    found = {run.seed: read(run) for run in row.runs}
    unit = row.runs[0].tokens_per_step if tokens else 1
    return _with_mean(found, unit)


def gap(results: Results, row: ComparedRow, read: Reader) -> list[Curve]:
    """The same for the difference to the baseline under the same seed, at the steps both have."""
    base = {run.seed: read(run) for run in results.row(results.baseline).runs}
    found = {}
    for run in row.runs:
        theirs = base.get(run.seed, {})
        found[run.seed] = {step: value - theirs[step] for step, value in read(run).items() if step in theirs}
    return _with_mean(found, 1)


def by_position(run: Run) -> dict[int, float]:
    """Final validation loss along the context, by the middle of each stretch in tokens."""
    bins = run.last_eval["loss_by_position"]
    width = run.identity["recipe"]["length"] / len(bins)
    return {round(width * (i + 0.5)): value for i, value in enumerate(bins)}


DRAWN: dict[str, Reader] = {
    "training_loss": training_loss,
    "validation_loss": valid_loss,
    "in_context_score": in_context,
    "induction_score": induction,
    "previous_token_attention": previous_token,
    "key_scale": key_scale,
    "key_scale_of_first_layer": first_key_scale,
}


def curve_rows(results: Results) -> list[dict[str, Any]]:
    """The drawn curves of every run as rows of a CSV."""
    return [
        {
            "row": row.name, "seed": run.seed, "curve": name, "step": step, "tokens": step * run.tokens_per_step,
            "value": value,
        }
        for row in results.rows
        for run in row.runs
        for name, read in DRAWN.items()
        for step, value in read(run).items()
    ]  # fmt: skip


def _with_mean(found: dict[int, dict[int, float]], unit: float) -> list[Curve]:
    """The curves of the seeds that have one, then their mean where all have a point."""
    drawn: dict[int | None, dict[int, float]] = {seed: values for seed, values in found.items() if values}
    if not drawn:
        return []
    common = sorted(set.intersection(*map(set, drawn.values())))
    mean = {step: sum(values[step] for values in drawn.values()) / len(drawn) for step in common}
    return [
        Curve(seed, [unit * step for step in values], [float(f"{value:.5g}") for value in values.values()])
        for seed, values in (drawn | {None: mean}).items()
    ]
