"""The tables of the pages, from the runs in results/."""

from __future__ import annotations

import csv
import itertools
import math
import pathlib
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from gva import GvaConfig, cost
from gva.report.curves import induction, task_score
from gva.report.tables import Table, difference, signed, spread
from gva.study.results import ComparedRow, Results, load
from gva.study.runs import TASKS, Run, score, standard_error
from gva.study.statistics import FEWEST, Estimate, paired

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "results"
MOTION = RESULTS / "key-motion.csv"
ZERO_SHOT, WHOLE = RESULTS / "conversion-zero-shot.csv", 384  # what the source caches
MAPS = [f"maps-x{factor}" for factor in (2, 4, 8, 16, 32)]
BEST = MAPS[-1]
INIT = ["gva-baseline", "gva-variance-fixed", "gva-scale-matched"]
NORMS = ["query-norm", f"query-norm-{BEST}"]
SMALL = ["small-maps", f"small-{BEST}"]
CLAIM = [
    "gqa", "gqa-half-the-groups", "gva-drope-16", "gva-drope-24", "gva-drope-16-twice-the-groups", BEST,
    f"{BEST}-half-the-groups", "gta", "mla", "shared-kv", *INIT,
]  # fmt: skip
POSITION = [
    "carved-8", "gva-drope-16", "gva-drope-24", "carved-32", "additive-16", "carved-16-base-100", "carved-16-base-1000",
]  # fmt: skip
SWEPT = ["gqa", "gva-drope-16", "maps-x8", "gqa-half-the-groups"]
RECIPES = {"": "1e-3", "-lr0.002": "2e-3", "-slow-start": "2e-3, warm-up 300"}
GROWTH = ["gqa", "gva-drope-16", *MAPS, *NORMS, *SMALL, *INIT, "gta"]
CHOSEN_BY = (0, 1, 2)  # the seeds on which that rate came out best of five
SWEPT_BY = (0, 1)  # and those that four rates for everything were tried on
FORMED = 0.1  # nats of induction, where a head that copies counts as there

MOVERS = {"k_proj": "GQA: `k_proj`", "key_map": "GVA: maps", "v_proj": "GVA: `v_proj`"}

Column = tuple[str, Callable[[ComparedRow], str]]


def grid(header: list[str], lines: Iterable[list[str]]) -> str:
    return Table(header, [("", False, line) for line in lines]).markdown()


def rows_table(names: Iterable[str], columns: list[Column], results: Results) -> str:
    """Of the rows, those that have been run."""
    there = {row.name: row for row in results.rows}
    rows = [there[name] for name in names if name in there]
    lines = [[f"`{row.name}`", *(read(row) for _, read in columns)] for row in rows]
    return grid(["row", *(title for title, _ in columns)], lines)


# ---- columns ----

SEEDS: Column = ("seeds", lambda row: str(row.valid_loss.n))
LOSS: Column = ("validation loss", lambda row: spread(row.valid_loss, 3))
MEDIAN: Column = ("median", lambda row: f"{statistics.median(row.valid_loss.values.values()):.3f}")
RANGE: Column = ("from, to", lambda row: from_to(row.valid_loss.values.values(), 3))
START: Column = ("at step 200", lambda row: from_to(losses(row)[200].values()))
SCALARS: Column = ("scalars", lambda row: str(cost.cache_scalars_per_token_per_layer(row.config)))


def apart(change: Estimate) -> str:
    """A difference with its interval; where seeds are too few for one, seed by seed."""
    return difference(change, 3) if change.interval else ", ".join(signed(d, 3) for d in change.values.values())


def against(peer: ComparedRow) -> Column:
    def read(row: ComparedRow) -> str:
        change = None if row.name == peer.name else paired(row.valid_loss.values, peer.valid_loss.values)
        return "" if change is None else apart(change)

    return f"against `{peer.name}`", read


def between(title: str, read: Callable[[Run], Iterable[float]]) -> Column:
    """From where to where a number lies, over all runs of a row."""

    def show(row: ComparedRow) -> str:
        return from_to([value for run in row.runs for value in read(run)])

    return title, show


def from_to(values: Collection[float], digits: int = 2) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return f"{low} to {high}" if len(values) > 1 else low


def last(run: Run) -> dict[str, Any]:
    """What the diagnostics saw at the end."""
    return max(run.of_kind("diagnostics"), key=lambda line: line["step"])


def scales(run: Run) -> list[dict[str, float]]:
    """Of queries, keys and values, by layer, at the end."""
    return last(run)["qk_scales"]


def growth(row: ComparedRow, step: int) -> float:
    """Content keys over values at a step, over layers and runs."""
    seen = [line for run in row.runs for line in run.of_kind("diagnostics") if line["step"] == step]
    return statistics.mean(s["k_nope"] / s["v"] for line in seen for s in line["qk_scales"])


def growth_table(results: Results, steps: Sequence[int]) -> str:
    columns: list[Column] = [(f"step {step}", lambda row, at=step: f"{growth(row, at):.2f}") for step in steps]
    return rows_table(GROWTH, [LOSS, *columns], results)


def formed(run: Run) -> int | None:
    """The step from which induction is there and stays."""
    stays = list(itertools.takewhile(lambda seen: seen[1] > FORMED, sorted(induction(run).items(), reverse=True)))
    return stays[-1][0] if stays else None


def formed_text(row: ComparedRow) -> str:
    steps = [formed(run) for run in row.runs]
    found = sorted(step for step in steps if step is not None)
    told = [f"{found[0]} to {found[-1]}" if found[0] != found[-1] else str(found[0])] if found else []
    return ", ".join([*told, *([f"never in {steps.count(None)}"] if None in steps else [])])


PREVIOUS = between("previous token", lambda run: [max(map(max, last(run)["previous_token_attention"]))])
INDUCTION = between("induction", lambda run: [induction(run)[run.steps]])
FORMED_AT: Column = (f"passes {FORMED} at step", formed_text)
OVER_VALUES = between("keys over values", lambda run: [s["k_nope"] / s["v"] for s in scales(run)])
OVER_QUERIES: Column = (
    "keys over queries",
    lambda row: f"{statistics.mean(s['k_nope'] / s['q_nope'] for run in row.runs for s in scales(run)):.2f}",
)
MECHANISM = [PREVIOUS, INDUCTION, FORMED_AT]


# ---- tables ----


def claim_table(results: Results) -> str:
    peers = [against(results.row(name)) for name in ("gqa", "gqa-half-the-groups", "gva-drope-16")]
    return rows_table(CLAIM, [SCALARS, SEEDS, LOSS, *peers], results)


def maps_table(results: Results) -> str:
    """What was tried against the lag at the low rate."""
    peers = [against(results.row(name)) for name in ("gqa", "gva-drope-16")]
    return rows_table(["gqa", "gva-drope-16", *MAPS, *NORMS, *SMALL], [SEEDS, LOSS, *peers, OVER_QUERIES], results)


def fresh_seeds(row: ComparedRow, chosen_by: tuple[int, ...]) -> dict[int, float]:
    """Those that had no part in a choice."""
    return {seed: loss for seed, loss in row.valid_loss.values.items() if seed not in chosen_by}


def correlation(runs: list[Run]) -> float:
    """Of ranks; a run in which induction never formed comes last."""
    steps = [step if (step := formed(run)) is not None else run.steps + 1 for run in runs]
    return statistics.correlation(ranks(steps), ranks([run.valid_loss for run in runs]))


def ranks(values: Sequence[float]) -> list[float]:
    """Equal values share the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def losses(row: ComparedRow) -> dict[int, dict[int, float]]:
    """By step and seed."""
    found: dict[int, dict[int, float]] = {}
    for run in row.runs:
        for line in run.of_kind("eval"):
            found.setdefault(line["step"], {})[run.seed] = line["valid_loss"]
    return found


def gap_table(results: Results, peer: str, names: list[str], every: int) -> str:
    """How far rows are from another over training, over the seeds that both have; without an interval, seed by seed."""
    base = losses(results.row(peer))
    found = {name: losses(results.row(name)) for name in names}
    lines = []
    steps = set(base).intersection(*found.values())
    for step in sorted(step for step in steps if step % every == 0):
        line = [str(step), spread(Estimate(base[step]), 3)]
        for name in names:
            change = paired(found[name][step], base[step])
            assert change is not None, f"{name} and {peer} share no seed"
            line += [spread(Estimate(found[name][step]), 3), apart(change)]
        lines.append(line)
    titles = []
    for name in names:
        shared = sorted(found[name][max(steps)].keys() & base[max(steps)].keys())
        few = f"seeds {', '.join(map(str, shared))}"
        titles += [f"`{name}`", f"paired, {f'{len(shared)} seeds' if len(shared) >= FEWEST else few}"]
    return grid(["step", f"`{peer}`", *titles], lines)


def rates_table(results: Results) -> str:
    """Every row at every learning rate, the chosen one in bold."""
    rates = sorted({rate.lr for rate in results.rates})
    told = {(rate.row, rate.lr): ("**{}**" if rate.chosen else "{}").format(few(rate.loss)) for rate in results.rates}
    names = dict.fromkeys(rate.row for rate in results.rates)
    lines = [[f"`{name}`", *(told.get((name, rate), "") for rate in rates)] for name in names]
    return grid(["row", *(f"{rate:g}" for rate in rates)], lines)


def few(loss: Estimate) -> str:
    """Seed by seed, where they are too few for a spread worth the name."""
    if loss.n >= FEWEST:
        return f"{spread(loss, 3)} ({loss.n} seeds)"
    return ", ".join(f"{loss.values[seed]:.3f}" for seed in sorted(loss.values))


def at_recipe(name: str, recipe: str) -> ComparedRow | None:
    """A row as steps 1 to 3 trained it at a recipe, under its own name; None where they did not."""
    folders = sorted(RESULTS.glob(f"small/[1-3]-*/runs/{name}{recipe}"))
    return replace(load(folders).rows[0], name=name) if folders else None


def recipes_table() -> str:
    """The rows that decide the claim at each recipe, against GQA at the same one, and on fresh seeds."""
    lines, fresh, titles = [], [], []
    for recipe, told in RECIPES.items():
        rows = {name: row for name in SWEPT if (row := at_recipe(name, recipe))}
        columns = [SEEDS, LOSS, MEDIAN, RANGE, against(rows["gqa"]), START]
        titles = [title for title, _ in columns]
        lines += [[f"`{name}`", told, *(read(row) for _, read in columns)] for name, row in rows.items()]
        change = paired(fresh_seeds(rows["gva-drope-16"], SWEPT_BY), rows["gqa"].valid_loss.values)
        fresh += [f"{apart(change)} at {told} (seeds 2 to {max(change.values)})"] if change else []
    return (
        grid(["row", "rate", *titles], lines)
        + f"\n\n`gva-drope-16` against `gqa` on seeds on which no rate was chosen: {', '.join(fresh)}."
    )


def position_table(results: Results) -> str:
    """Width, place and base of the positional slice."""
    columns: list[Column] = [
        SCALARS,
        ("slice", lambda row: f"{row.config.rope_dim} {row.config.rope_allocation}"),
        ("base", lambda row: f"{row.config.rope_theta:g}"),
        ("validation loss", lambda row: few(row.valid_loss)),
        against(results.row("gva-drope-16")),
    ]
    return rows_table(POSITION, [*columns, *MECHANISM], results)


def context_table(results: Results, stretches: int = 8) -> str:
    """Loss along the context, in so many stretches of it, and how far GVA is from GQA there."""
    gqa, gva = results.row("gqa"), results.row("gva-drope-16")
    length = gqa.runs[0].identity["recipe"]["length"] // stretches
    lines = []
    for i in range(stretches):
        ours, theirs = stretch_losses(gva, i, stretches), stretch_losses(gqa, i, stretches)
        lines.append([f"{i * length} to {(i + 1) * length - 1}", *compared(ours, theirs)])
    lines.append(["all", *compared(gva.valid_loss, gqa.valid_loss)])
    return grid(["tokens", "`gqa`", "`gva-drope-16`", "paired"], lines)


def stretch_losses(row: ComparedRow, i: int, stretches: int) -> Estimate:
    """At the end of training, in the i-th of so many stretches of the context."""
    found = {run.seed: run.of_kind("eval")[-1]["loss_by_position"] for run in row.runs}
    size = {len(parts) for parts in found.values()}.pop() // stretches
    return Estimate({seed: statistics.mean(parts[i * size : (i + 1) * size]) for seed, parts in found.items()})


def compared(ours: Estimate, theirs: Estimate) -> list[str]:
    change = paired(ours.values, theirs.values)
    return [few(theirs), few(ours), apart(change) if change else ""]


def medium_table(results: Results) -> str:
    """Loss and accuracies over training, in one seed of each row, and how far apart they end."""
    tasks = results.tasks()
    gqa, gva = (results.row(name).runs[0] for name in ("gqa", "gva-drope-16"))
    lines = []
    scores = {run.row: [task_score(task)(run) for task in tasks] for run in (gqa, gva)}
    for step in scores["gqa"][0]:
        loss = [losses(results.row(run.row))[step][run.seed] for run in (gqa, gva)]
        at = [[by_step[step] for by_step in scores[run.row]] for run in (gqa, gva)]
        pairs = [[statistics.mean(found) for found in at], *zip(*at, strict=True)]
        lines.append([str(step), *(f"{value:.3f}" for value in loss), signed(loss[1] - loss[0], 3)])
        lines[-1] += [f"{theirs:.1f}, {ours:.1f}" for theirs, ours in pairs]
    chance = [100 * gqa.tasks[task]["chance"] for task in tasks]
    lines.append(["chance", "", "", "", *(f"{value:.1f}" for value in [statistics.mean(chance), *chance])])
    change = [score(gva.tasks[task]) - score(gqa.tasks[task]) for task in tasks]
    error = [math.hypot(standard_error(gva.tasks[task]), standard_error(gqa.tasks[task])) for task in tasks]
    ends = [(statistics.mean(change), math.hypot(*error) / len(tasks)), *zip(change, error, strict=True)]
    lines.append(["apart", "", "", "", *(f"{signed(100 * value, 1)} ± {100 * over:.1f}" for value, over in ends)])
    header = ["step", "`gqa`", "`gva-drope-16`", "apart", "Avg.", *(TASKS[task] for task in tasks)]
    return grid(header, lines)


def keys_over_queries(row: ComparedRow, layer: int) -> float:
    """Of content, at the end, over runs."""
    return statistics.mean(s["k_nope"] / s["q_nope"] for run in row.runs for s in scales(run)[layer : layer + 1])


def first_layer_table(small: Results, medium: Results) -> str:
    """Sizes of what the first layer makes, when first looked at and at the end."""
    pair, slow = ["gqa", "gva-drope-16"], "-slow-start"
    found = [("31M, 1e-3", small.row(name)) for name in (*pair, BEST)]
    found += [(f"31M, {RECIPES[slow]}", row) for name in pair if (row := at_recipe(name, slow))]
    found += [("112M, 1.5e-3, warm-up 600", medium.row(name)) for name in pair]
    parts = {"q_nope": "queries", "k_nope": "keys", "v": "values", "k_rope": "positional key"}
    lines = []
    for told, row in found:
        seen = [run.of_kind("diagnostics") for run in row.runs]
        first, end = ([lines[at]["qk_scales"][0] for lines in seen] for at in (0, -1))
        sizes = {
            p: [statistics.mean(s[p] for s in at) for at in (first, end)] for p in parts if first[0][p] is not None
        }
        ratio = statistics.mean(s["k_nope"] / s["q_nope"] for s in end)
        lines.append([f"`{row.name}`", told, str(len(row.runs)), f"{seen[0][0]['step']}, {row.runs[0].steps}"])
        lines[-1] += [" → ".join(f"{size:.2f}" for size in sizes.get(part, [])) for part in parts] + [f"{ratio:.2f}"]
    return grid(["row", "recipe", "seeds", "steps", *parts.values(), "keys over queries, end"], lines)


def motion_table(device: str, step: int) -> str:
    """How far a stretch of training moves keys, by the matrix that moves them: RMS, means over layers."""
    with MOTION.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["device"] == device and int(row["step"]) == step]
    lines = []
    for width in sorted({int(row["width"]) for row in rows}):
        parts = {part: [row for row in rows if (row["part"], row["width"]) == (part, str(width))] for part in MOVERS}
        assert all(len({row["layer"] for row in found}) == len(found) for found in parts.values()), "measured twice"
        moved = [
            statistics.mean(float(row["motion"]) * float(row["keys"]) for row in found) for found in parts.values()
        ]
        expected = width / 64 / statistics.mean(float(row["values"]) for row in parts["key_map"])
        lines.append([str(width), *(f"{size:.4f}" for size in moved), f"{moved[0] / moved[1]:.1f}", f"{expected:.1f}"])
    made = " and ".join(sorted({f"torch {row['torch']}, commit {row['commit']}" for row in rows}))
    header = ["width", *MOVERS.values(), "`k_proj` over maps", "expected"]
    return grid(header, lines) + f"\n\nTen steps from step {step}, one seed; {device}, {made}."


def ranks_table(preset: str, variants: Sequence[str], ranks: Sequence[int], memory: int, context: int) -> str:
    """What each GPU caches of a token, and how many sequences fit beside the weights on one GPU."""
    lines = []
    for variant in variants:
        config = GvaConfig.preset(preset, variant=variant)
        held = [f"{cost.cache_scalars_per_token_per_layer(config, count):g}" for count in ranks]
        lines.append([f"`{variant}`", *held, str(cost.largest_batch(config, context, memory))])
    fits = f"sequences of {context:,} in {memory / 2**30:g} GiB"
    return grid(["variant", *(f"{count} GPU{'s' * (count > 1)}" for count in ranks), fits], lines)


def read_zero_shot() -> list[dict[str, str]]:
    with ZERO_SHOT.open(newline="") as file:
        return list(csv.DictReader(file))


def zero_shot(to: str, cache: int) -> str:
    """Nats above the source at the shortest context."""
    row = next(row for row in read_zero_shot() if (row["to"], row["cache"]) == (to, str(cache)))
    return f"{signed(float(row['above']), 3)} ± {float(row['error']):.3f}"


def zero_shot_table() -> str:
    """What a conversion costs before healing, by target and cache; a column for each length of context."""
    rows = [row for row in read_zero_shot() if row["to"] != "import"]
    lengths = sorted({int(row["length"]) for row in rows})
    lines = []
    for to, cache in dict.fromkeys((row["to"], row["cache"]) for row in rows):
        found = {int(row["length"]): row for row in rows if (row["to"], row["cache"]) == (to, cache)}
        line = [f"`{to}`", cache, f"{100 * (1 - int(cache) / WHOLE):.0f}%", next(iter(found.values()))["slices"] or "–"]
        for length in lengths:
            row = found.get(length)
            line.append(f"{signed(float(row['above']), 3)} ± {float(row['error']):.3f}" if row else "")
        lines.append(line)
    return grid(["target", "scalars", "saved", "slices", *(f"above the source, {n} tokens" for n in lengths)], lines)
