"""Draws docs/attention-variants.svg: what each attention keeps per token, for eight query heads.

python docs/draw_attention_variants.py > docs/attention-variants.svg
"""

from dataclasses import dataclass

BOX, GAP = 16, 4
PANEL = 8 * (BOX + GAP) + 24
HEIGHT = 292
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24313f; }
  .title { font-size: 15px; font-weight: 600; } .small { font-size: 11px; fill: #5a6876; }
  .query { fill: #9db4d0; } .key { fill: #e0a13c; } .value { fill: #2f9c95; } .rope { fill: #b4637a; }
  .latent { fill: #7c6bb0; } .built { fill: none; stroke: #e0a13c; stroke-width: 1.6; stroke-dasharray: 3 2; }
  .cache { fill: #7f8c9a; fill-opacity: 0.13; }
  @media (prefers-color-scheme: dark) { text { fill: #e4eaf0; } .small { fill: #a5b1bd; } }
"""


@dataclass
class Panel:
    name: str
    note: str
    built: int  # keys that are rebuilt and never stored; 0 for none
    keys: int
    values: int
    latent: bool = False
    rope: bool = False
    size: str = ""


PANELS = [
    Panel("MHA", "a key and a value per head", 0, 8, 8, size="2 H d_h"),
    Panel("GQA", "heads share keys and values", 0, 4, 4, size="2 G d_h"),
    Panel("MLA", "one latent for all", 8, 0, 0, latent=True, rope=True, size="d_c + d_r"),
    Panel("Shared KV", "the value is the key", 0, 0, 4, size="G d_h"),
    Panel("GVA", "K_h = V_g(h) M_h, absorbed", 8, 0, 4, rope=True, size="G d_h + d_r"),
]


def row(x: float, y: float, count: int, kind: str) -> str:
    """`count` boxes spread over the width of eight."""
    pitch = 8 * (BOX + GAP) / count
    return "".join(
        f'<rect class="{kind}" x="{x + pitch * (i + 0.5) - BOX / 2:.1f}" y="{y}" width="{BOX}" height="26" rx="3"/>'
        for i in range(count)
    )


def panel(p: Panel, x: float) -> str:
    width, parts = 8 * (BOX + GAP), []
    middle = x + width / 2
    text = f'<text text-anchor="middle" x="{middle:.0f}"'
    parts += [f'{text} y="24" class="title">{p.name}</text>', f'{text} y="42" class="small">{p.note}</text>']
    parts += [row(x, 56, 8, "query")]
    if p.built:
        parts += [row(x, 56 + 42, p.built, "built")]
    parts += [f'<rect class="cache" x="{x - 6:.0f}" y="140" width="{width + 12}" height="112" rx="8"/>']
    y = 148
    if p.keys:
        parts, y = [*parts, row(x, y, p.keys, "key")], y + 34
    if p.values:
        parts, y = [*parts, row(x, y, p.values, "value")], y + 34
    if p.latent:
        parts += [f'<rect class="latent" x="{x + 28:.0f}" y="{y}" width="{width - 56}" height="26" rx="3"/>']
        y += 34
    if p.rope:
        parts += [f'<rect class="rope" x="{middle - 8:.0f}" y="{y}" width="16" height="12" rx="3"/>']
    return "".join([*parts, f'{text} y="244" class="small">cached: {p.size}</text>'])


def legend(y: int) -> str:
    entries = [
        ("query", "query head"),
        ("built", "key rebuilt, never stored"),
        ("key", "cached key"),
        ("value", "cached value"),
        ("latent", "cached latent"),
        ("rope", "cached positional key"),
    ]
    parts, x = [], 24
    for kind, label in entries:
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="12" height="12" rx="2"/>')
        parts.append(f'<text class="small" x="{x + 18}" y="{y + 10}">{label}</text>')
        x += 34 + 6.2 * len(label)
    return "".join(parts)


def draw() -> str:
    width = PANEL * len(PANELS) + 16
    body = "\n".join(panel(p, 20 + i * PANEL) for i, p in enumerate(PANELS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" role="img">'
        f"<title>What each attention caches per token, for eight query heads</title><style>{STYLE}</style>\n"
        f"{body}\n{legend(266)}\n</svg>\n"
    )


if __name__ == "__main__":
    print(draw(), end="")
