"""The paper's two figures of attention heat maps, from their definition.

Ten positions, no mask: entry (i, j) is how much query i attends to key j, softmax_j(q_i k_j / sqrt(d_h)), with
coordinates q ~ N(0, sigma_Q^2) and k ~ N(0, sigma_K^2). Every panel has the same draw: only its scale differs. The
paper gives no numbers for "too small" and "too large"; 0.02 and 8 are ours, and so is d_h = 64.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gva.run.atomic import write_atomically

POSITIONS, HEAD, SEED = 10, 64, 0
CELL, GAP, LEFT, TOP = 19, 72, 34, 46
# Viridis, at nine points: even steps in lightness, readable without colour vision and in both themes.
COLORS = ("440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725")


@dataclass(frozen=True)
class Panel:
    title: str
    sigma_q: float
    sigma_k: float


FIGURES = {
    "scale": (Panel("matched", 1, 1), Panel("keys too small", 1, 0.02), Panel("keys too large", 1, 8)),
    "joint-scale": tuple(Panel("", sigma, sigma) for sigma in (0.006, 1, 4, 8)),
}
TITLES = {
    "scale": "Attention with keys at, far below and far above the scale of queries",
    "joint-scale": "Attention with queries and keys scaled together",
}


def weights(sigma_q: float, sigma_k: float) -> np.ndarray:
    """Attention weights [query, key]; rows sum to one."""
    rng = np.random.default_rng(SEED)
    q, k = sigma_q * rng.standard_normal((POSITIONS, HEAD)), sigma_k * rng.standard_normal((POSITIONS, HEAD))
    scores = q @ k.T / np.sqrt(HEAD)
    raised = np.exp(scores - scores.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def color(share: float) -> str:
    """Along the colour scale, share between 0 and 1."""
    stops = np.linspace(0, 1, len(COLORS))
    channels = ([int(color[i : i + 2], 16) for color in COLORS] for i in (0, 2, 4))
    return "#" + "".join(f"{round(np.interp(share, stops, channel)):02x}" for channel in channels)


def figure(name: str) -> str:
    """One of the two figures as SVG; text takes the colour of the page it stands in."""
    panels = FIGURES[name]
    size = POSITIONS * CELL
    width, height = LEFT + len(panels) * (size + GAP), TOP + size + 44
    body = "".join(_panel(panel, LEFT + i * (size + GAP)) for i, panel in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{TITLES[name]}"><style>.heat text{{font:12px system-ui,sans-serif;fill:#3a4452}}'
        ".heat .strong{font-weight:600;font-size:13px}"
        "@media(prefers-color-scheme:dark){.heat text{fill:#d5dce6}}</style>"
        '<g class="heat">'
        f'<text transform="translate(12 {TOP + size / 2}) rotate(-90)" text-anchor="middle">query</text>'
        f"{body}</g></svg>\n"
    )


def _panel(panel: Panel, x: float) -> str:
    values = weights(panel.sigma_q, panel.sigma_k)
    low, high, size = values.min(), values.max(), POSITIONS * CELL
    scales = f"σ_Q = {panel.sigma_q:g}, σ_K = {panel.sigma_k:g}"
    if panel.sigma_q == panel.sigma_k:
        scales = f"σ_Q = σ_K = {panel.sigma_q:g}"

    def said(y: float, text: str, style: str = "") -> str:
        return f'<text {style}x="{x + size / 2}" y="{y}" text-anchor="middle">{text}</text>'

    parts = [said(16, panel.title, 'class="strong" ')] if panel.title else []
    parts.append(said(35, scales))
    for (i, j), value in np.ndenumerate(values):
        place = f'x="{x + j * CELL}" y="{TOP + i * CELL}" width="{CELL}" height="{CELL}"'
        told = f"<title>query {i}, key {j}: {value:.4f}</title>"
        parts.append(f'<rect {place} fill="{color((value - low) / (high - low))}">{told}</rect>')
    sharpest = f"mean of the largest weights: {values.max(1).mean():.2f}"
    parts += [said(TOP + size + 17, "key"), said(TOP + size + 36, sharpest), _bar(x + size + 6, low, high, size)]
    return "".join(parts)


def _bar(x: float, low: float, high: float, size: int) -> str:
    """The panel's own colour scale, with its ends."""
    steps = 24
    step = size / steps
    cells = "".join(
        f'<rect x="{x}" y="{TOP + size - (i + 1) * step:.2f}" width="7" height="{step + 0.4:.2f}" '
        f'fill="{color(i / (steps - 1))}"/>'
        for i in range(steps)
    )
    digits = next(n for n in (2, 4, 5) if high - low > 10.0 ** (1 - n) or n == 5)
    return (
        f'{cells}<text x="{x + 10}" y="{TOP + 9}">{high:.{digits}f}</text>'
        f'<text x="{x + 10}" y="{TOP + size}">{low:.{digits}f}</text>'
    )


def write_figures(out: Path) -> list[Path]:
    """Both figures as SVG files."""
    out.mkdir(parents=True, exist_ok=True)
    paths = {name: out / f"attention-{name}.svg" for name in FIGURES}
    for name, path in paths.items():
        write_atomically(path, figure(name))
    return list(paths.values())
