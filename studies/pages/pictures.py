"""Plain SVG for pages: curves over an axis, differences as dots with their intervals, places in a plane.

Narrow enough to be read on a phone, and in both themes. A series is told by its name beside it and by its colour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from svg import svg, text

WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 34, 46
NAMED = "text, text.gva, text.gqa, text.mqa, text.other"
LOOK = f"""
  .zero {{ stroke: #7d8a98; stroke-width: 1.5; }}
  .gva {{ stroke: #c2410c; fill: #c2410c; }} .gqa {{ stroke: #1d5fa8; fill: #1d5fa8; }}
  .mqa {{ stroke: #6655a0; fill: #6655a0; }} .other {{ stroke: #6b7785; fill: #6b7785; }}
  polyline.line, path.line, circle.line {{ fill: none; stroke-width: 2; }}
  polygon.band {{ stroke: none; opacity: 0.16; }} .dash {{ stroke-dasharray: 5 4; }}
  {NAMED} {{ stroke: #f7f9fb; stroke-width: 4px; paint-order: stroke; }}
"""
DARK_LOOK = f"""
    .zero {{ stroke: #8896a4; }}
    .gva {{ stroke: #fb923c; fill: #fb923c; }} .gqa {{ stroke: #6fb1f0; fill: #6fb1f0; }}
    .mqa {{ stroke: #b3a4e6; fill: #b3a4e6; }} .other {{ stroke: #9aa7b4; fill: #9aa7b4; }}
    {NAMED} {{ stroke: #161c23; }}
"""


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    name: str
    kind: str  # gva, gqa, mqa or other
    points: Sequence[Point]
    dashed: bool = False


@dataclass(frozen=True)
class Dot:
    """A row of a list: where it is, from where to where it may be, and single seeds."""

    name: str
    kind: str
    at: float
    low: float | None = None
    high: float | None = None
    seeds: Sequence[float] = field(default_factory=tuple)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from below `low` to above `high`."""
    rough = (high - low) / count
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def told(value: float, step: float) -> str:
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    digits += not math.isclose(step * 10**digits, round(step * 10**digits), rel_tol=1e-6)
    return f"{value:,.{digits}f}".replace("-", "−")


def framed(title: str, height: float, body: list[str]) -> str:
    return svg(title, height, [text(14, 22, title, "strong"), *body], LOOK, DARK_LOOK, WIDTH)


@dataclass(frozen=True)
class Axes:
    """Where numbers lie in the picture."""

    x: list[float]
    y: list[float]
    doubling: bool = False  # y is a power of two

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[-1] - self.x[0])
        up = (y - self.y[0]) / (self.y[-1] - self.y[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP)

    def drawn(self, across: str, names: Sequence[str] = ()) -> list[str]:
        body = []
        for value in self.y:
            _, y = self.at(self.x[0], value)
            body.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            name = f"{2**value:,.0f}" if self.doubling else told(value, self.y[1] - self.y[0])
            body.append(text(LEFT - 8, y + 4, name, "small end"))
        for i, value in enumerate(self.x):
            x, _ = self.at(value, self.y[0])
            name = names[i] if names else told(value, self.x[1] - self.x[0])
            body.append(text(x, HEIGHT - BOTTOM + 18, name, "small middle"))
        body.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, across, "small middle"))
        if self.y[0] < 0 < self.y[-1]:
            _, y = self.at(self.x[0], 0)
            body.append(f'<path class="zero" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        return body


def curves(title: str, series: Sequence[Series], across: str, names: Sequence[str] = (), doubling: bool = False) -> str:
    """Lines with bands; each has its name at its end, moved off the others'. `names` stand for places 0, 1, 2 ...;
    with `doubling` heights are logarithms to base two."""
    points = [point for one in series for point in one.points]
    heights = [v for p in points for v in (p.y, p.low, p.high) if v is not None]
    places = [float(i) for i in range(len(names))] or ticks(min(p.x for p in points), max(p.x for p in points))
    low = min(heights) if doubling else min(0.0, *heights)
    axes = Axes(places, ticks(low, max(heights)), doubling)
    body = axes.drawn(across, names)
    for one in series:
        if all(p.low is not None for p in one.points):
            edge = [axes.at(p.x, p.low or 0) for p in one.points]
            edge += [axes.at(p.x, p.high or 0) for p in reversed(one.points)]
            body.append(f'<polygon class="band {one.kind}" points="{joined(edge)}"/>')
    for one in series:
        dash = " dash" if one.dashed else ""
        line = joined([axes.at(p.x, p.y) for p in one.points])
        body.append(f'<polyline class="line {one.kind}{dash}" points="{line}"/>')

    def end(one: Series) -> float:
        return axes.at(one.points[-1].x, one.points[-1].y)[1] - 7

    below = TOP + 4.0
    for one in sorted(series, key=end):
        below = max(end(one), below)
        body.append(text(WIDTH - RIGHT - 4, below, one.name, f"{one.kind} end"))
        below += 16
    return framed(title, HEIGHT, body)


def joined(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def dots(title: str, rows: Sequence[Dot], across: str) -> str:
    """A line to each row: its mean and interval, or its seeds where they are too few for one; zero is a line."""
    left = 14 + 7.2 * max(len(row.name) for row in rows)
    reach = [v for row in rows for v in (row.at, row.low, row.high, *row.seeds) if v is not None]
    at = ticks(min(0.0, *reach), max(0.0, *reach))
    pitch, bottom = 24, TOP + 10 + 24 * len(rows)

    def x(value: float) -> float:
        return left + 12 + (value - at[0]) / (at[-1] - at[0]) * (WIDTH - RIGHT - left - 24)

    body = []
    for value in at:
        kind = "zero" if value == 0 else "grid"
        body.append(f'<path class="{kind}" d="M{x(value):.1f} {TOP}V{bottom}"/>')
        body.append(text(x(value), bottom + 18, told(value, at[1] - at[0]), "small middle"))
    for i, row in enumerate(rows):
        y = TOP + 20 + pitch * i
        body.append(text(left, y + 4, row.name, f"{row.kind} end"))
        if row.low is not None and row.high is not None:
            body.append(f'<path class="line {row.kind}" d="M{x(row.low):.1f} {y}H{x(row.high):.1f}"/>')
            body.append(f'<circle class="{row.kind}" cx="{x(row.at):.1f}" cy="{y}" r="5"/>')
        for seed in row.seeds:
            body.append(f'<circle class="line {row.kind}" cx="{x(seed):.1f}" cy="{y}" r="4"/>')
    body.append(text((left + WIDTH - RIGHT) / 2, bottom + 38, across, "small middle"))
    return framed(title, bottom + 48, body)


def plane(title: str, rows: Sequence[tuple[Dot, float]], across: str, line: tuple[int, int] | None = None) -> str:
    """Rows by a second number, names beside them; `line` joins two of them by a dashed one."""
    heights = [v for row, _ in rows for v in (row.at, row.low, row.high, *row.seeds) if v is not None]
    places = [place for _, place in rows]
    axes = Axes(ticks(min(places), max(places)), ticks(min(0.0, *heights), max(heights)))
    body = axes.drawn(across)
    taken: list[tuple[float, float, float, float]] = []
    if line:
        first, last = (axes.at(rows[i][1], rows[i][0].at) for i in line)
        body.append(f'<polyline class="line other dash" points="{joined([first, last])}"/>')
        along = [tuple(a + (b - a) * i / 50 for a, b in zip(first, last, strict=True)) for i in range(51)]
        taken += [(x - 4, y - 4, x + 4, y + 4) for x, y in along]
    for row, place in rows:
        x, y = axes.at(place, row.at)
        seeds = [axes.at(place, value)[1] for value in row.seeds]
        if row.low is not None and row.high is not None:
            low, high = (axes.at(place, value)[1] for value in (row.low, row.high))
            body.append(f'<path class="line {row.kind}" d="M{x:.1f} {low:.1f}V{high:.1f}"/>')
        body += [f'<circle class="line {row.kind}" cx="{x:.1f}" cy="{at:.1f}" r="3"/>' for at in seeds]
        body.append(f'<circle class="{row.kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
        taken += [(x - 6, at - 6, x + 6, at + 6) for at in (y, *seeds)]
    for row, place in rows:
        x, y = axes.at(place, row.at)
        left, top, right, bottom = _free(x, y, 7.2 * len(row.name), taken)
        taken.append((left, top, right, bottom))
        kind, at = (row.kind, left) if left > x else (f"{row.kind} end", right)
        body.append(text(at, bottom - 3, row.name, kind))
    return framed(title, HEIGHT, body)


def _free(x: float, y: float, width: float, taken: Sequence[tuple[float, float, float, float]]) -> tuple[float, ...]:
    """Where a name beside a place lies on nothing; as near as may be."""
    beside = [
        box
        for down in sorted(range(-60, 62, 2), key=lambda down: abs(down - 4))
        for left in (x + 9, x - 9 - width)
        if (box := (left, y + down - 11, left + width, y + down + 3))[0] > LEFT and box[2] < WIDTH - 4
    ]
    clear = (b for b in beside if not any(b[0] < t[2] and t[0] < b[2] and b[1] < t[3] and t[1] < b[3] for t in taken))
    return next(clear, beside[0])
