"""Which pictures there are, and of what."""

from __future__ import annotations

import math
from typing import Any

import pictures
import tables
from figures import change
from pictures import Dot, Point, Series

from gva import GvaConfig, cost
from gva.study.results import ComparedRow
from gva.study.statistics import FEWEST

ABOVE = "nats above GQA at the end, with 95% intervals"


def kind(row: ComparedRow) -> str:
    attention = row.config.attention
    few = attention == "gqa" and row.config.num_value_groups == 1
    return "mqa" if few or attention == "mqa" else attention if attention in ("gva", "gqa") else "other"


def dot(name: str, row: ComparedRow, peer: ComparedRow) -> Dot:
    found = change(row, peer)
    low, high = found.interval or (None, None)
    return Dot(name, kind(row), found.mean, low, high, list(found.values.values()) if found.n < FEWEST else ())


def gap(name: str, row: ComparedRow, peer: ComparedRow, look: str = "") -> Series:
    """How far a row is above another over training."""
    ours, theirs = tables.losses(row), tables.losses(peer)
    points = []
    for step in sorted(ours.keys() & theirs.keys()):
        found = change(row, peer, step=step)
        points.append(Point(step, found.mean, *(found.interval or (None, None))))
    return Series(name, look or kind(row), points)


def list_of(title: str, rows: Any, names: list[str], peer: str, across: str = ABOVE) -> str:
    return pictures.dots(title, [dot(name, rows[name], rows[peer]) for name in names if name != peer], across)


def frontier(rows: Any) -> str:
    """Loss over cache; the dashed line is what a mix of MQA and GQA would give if losses mixed as caches do."""
    shown = {"gqa": "GQA", "mqa": "MQA", "gva-two-groups": "GVA G=2, d_r 32", "gva-one-group": "GVA G=1, d_r 48",
             "mla": "MLA", "gta": "GTA"}  # fmt: skip
    there = [name for name in shown if name in rows]
    found = [
        (dot(shown[name], rows[name], rows["gqa"]), cost.cache_scalars_per_token_per_layer(rows[name].config))
        for name in there
    ]
    ends = there.index("mqa"), there.index("gqa")
    return pictures.plane("Nats above GQA over what a token caches", found, "scalars per token and layer", ends)


def over_ranks(preset: str = "llama-8b", ranks: tuple[int, ...] = (1, 2, 4, 8)) -> str:
    rows = {
        "GQA": ("gqa", "gqa"),
        "MQA": ("mqa", "mqa"),
        "MLA": ("mla", "other"),
        "GVA, d_r 32": ("gva-drope-32", "gva"),
    }
    series = []
    for name, (variant, look) in rows.items():
        config = GvaConfig.preset(preset, variant=variant)
        held = [cost.cache_scalars_per_token_per_layer(config, count) for count in ranks]
        series.append(Series(name, look, [Point(i, math.log2(size)) for i, size in enumerate(held)]))
    title = "Scalars of a token on each GPU, a layer, the 8B shape"
    return pictures.curves(title, series, "tensor-parallel GPUs", [str(count) for count in ranks], doubling=True)


def growth(rows: Any) -> str:
    shown = {"gqa": "gqa", "gva-drope-16": "gva", "maps-x32": "other"}
    series = [
        Series(name, look, [Point(step, tables.growth(rows[name], step)) for step in range(100, 1300, 100)])
        for name, look in shown.items()
    ]
    return pictures.curves("Size of content keys over that of values, at 1e-3", series, "step")


def recipes(at: Any) -> str:
    found = [dot(f"GVA, {told}", rows["gva-drope-16"], rows["gqa"]) for told, rows in at.items()]
    return pictures.dots("The paper's GVA above GQA, by recipe", found, ABOVE)


def all_of(known: dict[str, Any]) -> dict[str, str]:
    small, position, medium = known["small"], known["position"], known["medium"]
    pair = ("gva-drope-16", "maps-x32")
    lines = [gap(pair[0], small[pair[0]], small["gqa"]), gap(pair[1], small[pair[1]], small["gqa"], "other")]
    return {
        "frontier": frontier(known["frontier_recipes"]),
        "over-ranks": over_ranks(),
        "1-seeds": pictures.curves("Nats above GQA over training, eight seeds, 95% intervals", lines, "step"),
        "2-variants": list_of("Above GQA at 1e-3", small, tables.CLAIM, "gqa"),
        "3-recipes": recipes(known["at"]),
        "4-position": list_of("Above a slice of 16, two seeds", position, tables.POSITION, "gva-drope-16",
                              "nats above gva-drope-16 at the end, seed by seed"),
        "5-maps": list_of("Above GQA at 1e-3", small, ["gva-drope-16", *tables.MAPS, *tables.NORMS], "gqa"),
        "5-inside": growth(small),
        "6-medium": pictures.curves("Nats above GQA over training, 112M, one seed",
                                    [gap("gva-drope-16", medium["gva-drope-16"], medium["gqa"])], "step"),
    }  # fmt: skip
