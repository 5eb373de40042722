"""How a row is called and drawn: the same name, colour, dash and marker in every panel of every report."""

from dataclasses import dataclass, replace
from html import escape
from itertools import cycle

LABELS = {
    "mha": "MHA",
    "mqa": "MQA",
    "gqa": "GQA",
    "mla": "MLA",
    "shared-kv": "Shared KV",
    "shared-kv-qnorm": "Shared KV + Q-norm",
    "gva-baseline": "GVA baseline",
    "gva-scale-matched": "GVA scale-matched",
    "gva-variance-fixed": "GVA variance-fixed",
    "gva-drope-24": "GVA + DRoPE 24",
    "gva-drope-16": "GVA + DRoPE 16",
    "gva-drope-32": "GVA + DRoPE 32",
    "gva-one-group": "GVA, one group",
    "gta": "GTA",
    "gva": "GVA",
}


@dataclass(frozen=True)
class Style:
    light: str
    dark: str
    dash: str
    symbol: str


# Hues after Okabe and Ito, which stay apart under the common colour deficiencies; the reference is ink. Dash and marker
# tell apart what hue does not.
STYLES = {
    "gqa": Style("#2b3440", "#e8edf4", "solid", "circle"),
    "gva-drope-16": Style("#0061a8", "#58a9f0", "solid", "diamond"),
    "shared-kv": Style("#c8420c", "#ff8b5e", "solid", "x"),
    "gva-baseline": Style("#c28400", "#f0b83c", "solid", "square"),
    "mla": Style("#7a3fb0", "#bd92ea", "solid", "triangle-up"),
    "gva-scale-matched": Style("#00845e", "#3bcb9e", "solid", "pentagon"),
    "gva-variance-fixed": Style("#b1447c", "#ea8fbb", "solid", "star"),
    "gva-drope-24": Style("#3a9bd2", "#86cdf5", "dash", "diamond-tall"),
    "shared-kv-qnorm": Style("#c8420c", "#ff8b5e", "dash", "cross"),
    "mha": Style("#768192", "#9ba7b7", "dash", "circle-open"),
    "mqa": Style("#8a5a3c", "#cf9d7b", "solid", "triangle-down"),
    "gva": Style("#d6336c", "#ff7aa2", "solid", "star-diamond"),
    "gva-drope-32": Style("#0061a8", "#58a9f0", "dash", "diamond-open"),
    "gva-one-group": Style("#d6336c", "#ff7aa2", "dash", "star-diamond-open"),
    "gta": Style("#74741c", "#cccc60", "solid", "hexagon"),
}
# What the page itself is drawn with; page.css has the same names as variables.
THEMES = {
    "light": {
        "ink": "#1f2733", "soft": "#5d6876", "line": "#e3e7ec", "axis": "#c3cad3", "card": "#ffffff", "page": "#f6f7f9",
        "accent": "#0061a8", "second": "#c28400",
    },
    "dark": {
        "ink": "#e8edf4", "soft": "#9ba7b7", "line": "#2a323d", "axis": "#465161", "card": "#171c23", "page": "#0f1318",
        "accent": "#58a9f0", "second": "#f0b83c",
    },
}  # fmt: skip


def label(row: str) -> str:
    return LABELS.get(row, row)


def drawn(row: str) -> str:
    """The same for Plotly, which takes some HTML and, in what it shows on hovering, templates."""
    return escape(label(row), quote=False).replace("{", "&#123;")


def styles(rows: list[str]) -> dict[str, Style]:
    """Known variants have their own; other rows take what no present row uses, dotted."""
    free = cycle([style for name, style in STYLES.items() if name not in rows] or STYLES.values())
    return {row: STYLES[row] if row in STYLES else replace(next(free), dash="dot") for row in rows}


def palette(rows: list[str]) -> dict[str, dict[str, str]]:
    """Colours by theme and name; a row's is under `row:NAME`."""
    drawn = styles(rows)
    return {
        "light": THEMES["light"] | {f"row:{name}": style.light for name, style in drawn.items()},
        "dark": THEMES["dark"] | {f"row:{name}": style.dark for name, style in drawn.items()},
    }
