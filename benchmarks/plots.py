"""The pictures of measured numbers: SVG for light and dark, wide enough for a phone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from asked import Asked
from measured import Row, decoded
from svg import WIDTH, line, svg, text

LEFT, RIGHT = 46, 14
LOOK = """
  .a { stroke: #2a6fb0; } .b { stroke: #c46a1b; } .full.a { fill: #2a6fb0; } .full.b { fill: #c46a1b; }
  .open { fill: #f7f9fb; } .mark { stroke-width: 1.8; } .asked { stroke-width: 1.6; stroke-dasharray: 5 3; }
  .bar { fill: #9cc3e6; } .dot { fill: #2a6fb0; } .bound { stroke: #b03a2e; stroke-width: 2; }
"""
DARK_LOOK = """
    .a { stroke: #72b0e8; } .b { stroke: #f0a35c; } .full.a { fill: #72b0e8; } .full.b { fill: #f0a35c; }
    .open { fill: #161c23; } .bar { fill: #2c5273; } .dot { fill: #a9d2f5; } .bound { stroke: #ef8a7e; }
"""


# ---- efficiency over the size of the cache ----

LAYOUTS = {"row": ("a", "rows, as vLLM has them"), "separate": ("b", "separate pages")}
ASKED_OF_BATCHES = {  # least efficiency from so many MiB on
    "row": {64: 0.88, 256: 0.93, 1024: 0.96},
    "separate": {64: 0.92, 1024: 0.97},
}
TOP, FLOOR, SMALLEST, LARGEST = 58, 292, 3.4, 2600


def place() -> tuple[Callable[[float], float], Callable[[float], float]]:
    def x(mib: float) -> float:
        return LEFT + math.log(mib / SMALLEST) / math.log(LARGEST / SMALLEST) * (WIDTH - LEFT - RIGHT)

    def y(efficiency: float) -> float:
        return FLOOR - (efficiency - 0.7) / 0.3 * (FLOOR - TOP)

    return x, y


def marker(row: Row) -> str:
    x, y = place()
    left, top = x(int(row["bytes"]) / 2**20) - 4, y(float(row["efficiency"])) - 4
    kind = f"mark {'full' if row['B'] != '1' else 'open'} {LAYOUTS[row['layout']][0]}"
    shape = f"H={row['H']} G={row['G']} d_h={row['d_h']} d_r={row['d_r']}"
    told = f"<title>{row['B']} x {row['T']}, {shape}: {row['efficiency']}</title>"
    round_corners = ' rx="4"' if row["layout"] == "row" else ""
    return f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="8" height="8"{round_corners}>{told}</rect>'


def efficiency(rows: list[Row]) -> str:
    """Of one new token, over the size of the cache, and what was asked of batches."""
    x, y = place()
    body = [text(12, 22, "Efficiency of decoding on an H200", "strong")]
    body.append(text(12, 41, "speed-up over FlashAttention-3 / ratio of bytes; 1 is the limit", "small"))
    for value in (0.7, 0.8, 0.9, 1.0):
        body += [
            line(LEFT, y(value), WIDTH - RIGHT, y(value), "grid"),
            text(LEFT - 6, y(value) + 4, f"{value}", "small end"),
        ]
    for mib in (4, 16, 64, 256, 1024):
        body.append(text(x(mib), FLOOR + 18, f"{mib} MiB" if mib < 1024 else "1 GiB", "small middle"))
    for layout, (colour, _) in LAYOUTS.items():
        bars = ASKED_OF_BATCHES[layout]
        for low, high in zip(bars, [*list(bars)[1:], LARGEST], strict=True):
            body.append(line(x(low), y(bars[low]), x(high), y(bars[low]), f"asked {colour}"))
    body += [marker(row) for row in decoded(rows)]
    for i, (colour, words) in enumerate(LAYOUTS.values()):
        left = 12 + 200 * i
        corners = ' rx="4"' if colour == "a" else ""
        body.append(f'<rect class="mark full {colour}" x="{left}" y="{FLOOR + 32}" width="8" height="8"{corners}/>')
        body.append(text(left + 14, FLOOR + 41, words, "small"))
    body.append(text(12, FLOOR + 60, "Hollow: one sequence. Dashed: what was asked of batches.", "small"))
    return svg("Efficiency of decoding over the size of the cache", FLOOR + 72, body, LOOK, DARK_LOOK)


# ---- what was asked, as bars ----


def ratios(title: str, note: str, lines: Sequence[Asked], longest: float) -> str:
    """A bar for the median of each line, a dot for each run, and the bar that was asked."""
    scale = (WIDTH - 2 * RIGHT) / longest
    one, pitch, top = RIGHT + scale, 46, 62
    bottom = top + pitch * len(lines)
    body = [text(RIGHT, 22, title, "strong"), text(RIGHT, 41, note, "small")]
    for i, asked in enumerate(lines):
        assert not isinstance(asked.bar, str)
        y, middle = top + pitch * i, statistics.median(asked.values)
        body.append(text(RIGHT, y + 12, asked.what.removeprefix("350M: ")))
        body.append(text(WIDTH - RIGHT, y + 12, f"{middle:.2f}{asked.unit}", "strong end"))
        body.append(f'<rect class="bar" x="{RIGHT}" y="{y + 18}" width="{middle * scale:.1f}" height="16" rx="2"/>')
        body.append(line(one, y + 18, one, y + 34, "axis"))
        body.append(line(RIGHT + asked.bar * scale, y + 16, RIGHT + asked.bar * scale, y + 36, "bound"))
        if len(asked.values) > 1:
            body += [
                f'<circle class="dot" cx="{RIGHT + value * scale:.1f}" cy="{y + 26}" r="3.5"/>'
                for value in asked.values
            ]
    body.append(text(RIGHT, bottom + 10, "Grey line: GQA. Red: what was asked. Dots: runs, where several.", "small"))
    return svg(title, bottom + 24, body, LOOK, DARK_LOOK)
