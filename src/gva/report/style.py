"""How a row is called and drawn: the same name, colour, dash and marker in every panel of a report."""

from dataclasses import dataclass
from html import escape

from gva.study.results import ComparedRow

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
class Family:
    """Rows that work alike: a name, and the two ends of their colours on light and on dark paper."""

    name: str
    light: tuple[str, str]
    dark: tuple[str, str]


# Hues after Okabe and Ito, which stay apart under the common colour deficiencies; keys and values, being the reference,
# are ink. The shades of one family are told apart by dash and marker, and by the names at the lines.
FAMILIES = {
    "gqa": Family("Keys and values", ("#1f2733", "#8993a1"), ("#eef2f8", "#8492a5")),
    "gva": Family("GVA, rotated slice", ("#0a4fc4", "#0d9f9a"), ("#5a9dff", "#4fdccb")),
    "gva-rope": Family("GVA, rotated whole", ("#9a5b00", "#cf9400"), ("#e8951e", "#f8d86e")),
    "shared_kv": Family("Shared KV", ("#c0390a", "#ee7a52"), ("#ff7a45", "#ffb79b")),
    "mla": Family("MLA", ("#7a3fb0", "#b27ddf"), ("#b98cec", "#dcc6f8")),
    "gta": Family("GTA", ("#5f6a10", "#99a43c"), ("#bfca4a", "#e4ea9e")),
    "": Family("Others", ("#b1326f", "#e57fae"), ("#f07bb0", "#f8bcd8")),
}
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SYMBOLS = (
    "circle", "diamond", "square", "triangle-up", "cross", "star", "triangle-down", "pentagon", "x", "hexagon",
    "triangle-left", "star-diamond", "triangle-right", "bowtie",
)  # fmt: skip
MANY = 8  # rows beyond which all cannot be looked at together: two stand out, and the others until one is picked


@dataclass(frozen=True)
class Style:
    number: int  # its place among the rows, from 1: what stands at a line where there is no room for its name
    family: str
    light: str
    dark: str
    dash: str
    symbol: str


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


def family(row: ComparedRow) -> str:
    """The key of a row's family, from what its attention is."""
    attention = {"mha": "gqa", "mqa": "gqa"}.get(row.config.attention, row.config.attention)
    if attention == "gva" and row.config.positional == "rope":
        return "gva-rope"
    return next((key for key in FAMILIES if key and attention.startswith(key)), "")  # gva_untied is of gva


def styles(rows: list[ComparedRow]) -> dict[str, Style]:
    """By name of row: a shade of its family, and the dash and marker that no neighbouring shade has."""
    members: dict[str, list[str]] = {}
    for row in rows:
        members.setdefault(family(row), []).append(row.name)
    found = {}
    for number, row in enumerate(rows, 1):
        key = family(row)
        place, last = members[key].index(row.name), len(members[key]) - 1
        light, dark = (
            _between(*ends, place / last if last else 0.0) for ends in (FAMILIES[key].light, FAMILIES[key].dark)
        )
        dash, symbol = DASHES[place % len(DASHES)], SYMBOLS[(number - 1) % len(SYMBOLS)]
        found[row.name] = Style(number, key, light, dark, dash, symbol)
    return found


def _between(start: str, end: str, share: float) -> str:
    """The colour at that share of the way between two."""
    pairs = [(int(start[i : i + 2], 16), int(end[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in pairs)


def palette(rows: list[ComparedRow]) -> dict[str, dict[str, str]]:
    """Colours by theme and name; a row's is under `row:NAME`."""
    drawn = styles(rows)
    return {
        "light": THEMES["light"] | {f"row:{name}": style.light for name, style in drawn.items()},
        "dark": THEMES["dark"] | {f"row:{name}": style.dark for name, style in drawn.items()},
    }
