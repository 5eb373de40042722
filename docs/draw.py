"""Draws the packages and their arrows, the row that each attention caches, and how a decode kernel shares its work.

    python docs/draw.py

Arrows are those that tests/test_architecture.py allows, rows those that the attentions declare: only where a box stands
is said here. Needs this package and what its tests need.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

from gva import GvaConfig, cost
from gva.attention import Part, class_of

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "docs"), str(ROOT / "tests")]

from svg import WIDTH, svg, text  # noqa: E402

from test_architecture import ARROWS  # noqa: E402

LOOK = """
  .folder { fill: #dfe9f5; stroke: #4f7cac; } .file { fill: #fff; stroke: #8a97a5; }
  .arrow { stroke: #7d8a98; stroke-width: 1.2; } .head { fill: #7d8a98; }
  .key { fill: #e8b45c; } .value { fill: #63b8b1; } .latent { fill: #a99bd3; } .rope { fill: #d58ba1; }
  .piece { stroke: #f7f9fb; stroke-width: 1.5; } .whole { stroke: #1f2a36; stroke-width: 2; }
"""
DARK_LOOK = """
    .folder { fill: #24384f; stroke: #6d9bcb; } .file { fill: #1f262e; stroke: #75828f; }
    .arrow { stroke: #8896a4; } .head { fill: #8896a4; }
    .key { fill: #a8741b; } .value { fill: #22776f; } .latent { fill: #6655a0; } .rope { fill: #9a4a64; }
    .piece { stroke: #161c23; } .whole { stroke: #e3e9ef; }
"""


def drawn(title: str, height: float, body: list[str]) -> str:
    return svg(title, height, body, LOOK, DARK_LOOK)


# ---- the packages ----

BOX_WIDTH, BOX_HEIGHT, PITCH = 98, 38, 66
EVERYWHERE = {"errors", "text", "presets", "remote"}  # import nothing, and whoever wants may import them: not drawn
EVERYWHERE |= {"convert", "nn"}  # nobody imports them but cli and users: not drawn either
# From the left in pixels, from the top in rows, and what is in it.
PLACES = {
    "cli": (234, 0, "parses, prints"),
    "report": (234, 1, "runs to a page"),
    "check": (358, 1, "gva check"),
    "study": (176, 2, "many runs"),
    "train": (203, 3, "one run"),
    "serve": (16, 3, "vLLM plugin"),
    "evaluate": (170, 4, "tasks, loss"),
    "cost": (322, 4, "counts"),
    "model": (218, 5, "HuggingFace's"),
    "paged": (54, 5, "pages, decode"),
    "config": (202, 6, "sizes, layers"),
    "diagnostics": (358, 6, "looks inside"),
    "caches": (326, 7, "transformers'"),
    "weights": (0, 7, "their files"),
    "data": (78, 8, "text to tokens"),
    "attention": (228, 8, "a file for each"),
    "run": (48, 9, "a run's folder"),
    "ops": (228, 9, "kernels"),
}


def direct(arrows: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that no longer way stands for."""

    def reached(part: str) -> set[str]:
        return arrows[part].union(*(reached(other) for other in arrows[part]))

    return [
        (part, other)
        for part in arrows
        for other in sorted(arrows[part])
        if not any(other in reached(between) for between in arrows[part])
    ]


def corner(part: str) -> tuple[float, float]:
    x, row, _ = PLACES[part]
    return 12 + x, 12 + row * PITCH


def ends(arrows: list[tuple[str, str]]) -> Iterator[tuple[str, str, tuple[float, float, float, float]]]:
    """Where each arrow leaves its box and reaches the other: side by side, in the order in which they come."""

    def port(part: str, arrow: tuple[str, str], side: int) -> float:
        def slope(a: tuple[str, str]) -> float:
            x, row, _ = PLACES[a[1 - side]]
            return (x - PLACES[part][0]) / abs(row - PLACES[part][1])

        beside = sorted((a for a in arrows if a[side] == part), key=slope)
        return corner(part)[0] + BOX_WIDTH * (beside.index(arrow) + 1) / (len(beside) + 1)

    for arrow in arrows:
        above, below = arrow
        line = (port(above, arrow, 0), corner(above)[1] + BOX_HEIGHT, port(below, arrow, 1), corner(below)[1])
        yield above, below, line


def drawn_arrows() -> list[tuple[str, str]]:
    return [arrow for arrow in direct(ARROWS) if not EVERYWHERE & set(arrow)]


def packages() -> str:
    body = []
    for _, _, (x0, y0, x1, y1) in ends(drawn_arrows()):
        length = math.hypot(x1 - x0, y1 - y0)
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        bx, by = x1 - 8 * dx, y1 - 8 * dy
        body.append(f'<line class="arrow" x1="{x0:.1f}" y1="{y0:.1f}" x2="{bx:.1f}" y2="{by:.1f}"/>')
        points = ((x1, y1), (bx - 3.5 * dy, by + 3.5 * dx), (bx + 3.5 * dy, by - 3.5 * dx))
        body.append(f'<polygon class="head" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
    for part, (_, _, note) in PLACES.items():
        x, y = corner(part)
        kind = "folder" if (ROOT / "src" / "gva" / part).is_dir() else "file"
        body.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>')
        body.append(text(x + BOX_WIDTH / 2, y + 16, part, "strong middle"))
        body.append(text(x + BOX_WIDTH / 2, y + 31, note, "small middle"))
    height = 12 + 9 * PITCH + BOX_HEIGHT + 34
    body.append(
        text(
            12,
            height - 12,
            "Blue: a folder. Others: one file. Left out: errors.py and text.py, which import nothing.",
            "small",
        )
    )
    return drawn("The packages of gva and which imports which", height, body)


# ---- the cached row ----

ROWS = {"GVA": "gva-drope-16", "MLA": "mla", "GQA": "gqa", "Shared KV": "shared-kv"}
PRESET, RANKS = "paper-350m", 2
KINDS = {  # of what each projection gives
    "v_proj": ("value", "value"),
    "k_proj": ("key", "key"),
    "latent_proj": ("latent", "latent"),
    "k_rope_proj": ("rope", "rotated key, one for all heads"),
}
LEFT, BAR, BLOCK = 14, 28, 100


def cached(config: GvaConfig) -> list[tuple[str, Part]]:
    """The parts of the row with the projections that they come from."""
    projected = class_of(config).projections(config)
    parts = config.row.parts
    assert list(projected.values()) == list(parts), f"{config.attention}: what is projected is not what is cached"
    return list(zip(projected, parts, strict=True))


def told(config: GvaConfig) -> list[str]:
    """What fp8 rounds, and what a rank holds."""
    row, size = config.row, cost.cache_row_bytes(config, "fp8")
    if row.packs:
        (content,), rope = row.content, row.rope
        scales = 4 * content.heads
        parts = {"rounded": content.size, "rotated key as it is": 2 * rope.size, "scales": scales}
        parts["padding"] = size - sum(parts.values())
        fp8 = f"fp8, {size} bytes: " + ", ".join(f"{count} {what}" for what, count in parts.items() if count)
    elif config.rotates_late:
        fp8 = "fp8: none"
    else:
        fp8 = f"fp8, {size} bytes: {size} rounded, in vLLM's own cache"
    return [fp8, f"over {RANKS} ranks: each holds {row.over(RANKS).scalars} of the {row.scalars} scalars"]


def block(name: str, config: GvaConfig, y: float, scale: float) -> list[str]:
    row, x = config.row, float(LEFT)
    size = f"{row.scalars} scalars, {cost.cache_row_bytes(config)} bytes in bfloat16"
    body = [text(LEFT, y, name, "strong"), text(WIDTH - LEFT, y, size, "small end")]
    for projection, part in cached(config):
        width = part.width * scale
        kind = f"{KINDS[projection][0]} {'whole' if part.shared else 'piece'}"
        for _ in range(part.heads):
            body.append(f'<rect class="{kind}" x="{x:.1f}" y="{y + 10:g}" width="{width:.1f}" height="{BAR}"/>')
            if width > 24:
                body.append(text(round(x + width / 2, 1), y + 10 + BAR / 2 + 4, str(part.width), "middle"))
            else:  # beside it, the last part of its row
                body.append(text(round(x + width + 6, 1), y + 10 + BAR / 2 + 4, str(part.width)))
            x += width
    return body + [text(LEFT, y + 25 + BAR + 15 * i, line, "small") for i, line in enumerate(told(config))]


def legend(y: float) -> list[str]:
    lines = [list(KINDS.values()), [("file whole", "whole on every rank"), ("file", "heads split over ranks")]]
    body = []
    for i, line in enumerate(lines):
        x = float(LEFT)
        for kind, words in line:
            body.append(f'<rect class="{kind}" x="{x:g}" y="{y + 20 * i - 10:g}" width="12" height="12"/>')
            body.append(text(x + 18, y + 20 * i, words, "small"))
            x += 40 + 6 * len(words)
    return body


def rows() -> str:
    configs = {name: GvaConfig.preset(PRESET, variant=variant) for name, variant in ROWS.items()}
    scale = (WIDTH - 2 * LEFT) / max(config.row.scalars for config in configs.values())
    body = [line for i, name in enumerate(configs) for line in block(name, configs[name], 24 + BLOCK * i, scale)]
    height = BLOCK * len(configs) + 62
    return drawn("What a token leaves in the cache of one layer", height, [*body, *legend(BLOCK * len(configs) + 24)])


# ---- how a decode kernel shares its work ----

TILES, GAP, SHARES = (13, 2, 10, 28), 4, 5  # of four sequences; a sequence costs a gap to begin
SEQUENCES = ("value", "key", "latent", "rope")


def shares() -> str:
    count = sum(TILES) + GAP * len(TILES)
    tile, x, top = (WIDTH - 2 * LEFT) / count, float(LEFT), 64
    body = [text(LEFT, 22, "Tiles of all sequences on one line, in equal shares", "strong")]
    for i, (tiles, kind) in enumerate(zip(TILES, SEQUENCES, strict=True)):
        body.append(f'<rect class="file" x="{x:.1f}" y="{top}" width="{GAP * tile:.1f}" height="{BAR}"/>')
        x += GAP * tile
        body.append(text(x, top - 8, f"sequence {i}" if tiles > 9 else f"{i}", "small"))
        for _ in range(tiles):
            body.append(f'<rect class="{kind} piece" x="{x:.1f}" y="{top}" width="{tile:.1f}" height="{BAR}"/>')
            x += tile
    width = (WIDTH - 2 * LEFT) / SHARES
    for i in range(SHARES):
        left, right, low = LEFT + i * width + 2, LEFT + (i + 1) * width - 2, top + BAR + 14
        body.append(f'<path class="arrow" fill="none" d="M{left:.1f} {low - 7}V{low}H{right:.1f}V{low - 7}"/>')
        body.append(text(round((left + right) / 2, 1), low + 17, f"share {i}", "small middle"))
    body.append(
        text(LEFT, 146, "Empty: what it costs to begin a sequence, as much as four tiles. A share holds", "small")
    )
    body.append(
        text(LEFT, 162, "at most one sequence that it does not begin, and one that it does not finish.", "small")
    )
    return drawn("How a decode kernel shares its work", 176, body)


def pages() -> dict[Path, str]:
    drawn = {"packages": packages(), "cached-row": rows(), "shares": shares()}
    return {ROOT / "docs" / f"{name}.svg": picture for name, picture in drawn.items()}


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content, encoding="utf-8")
