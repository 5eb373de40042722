"""What all drawn pictures share: a frame, text and lines, one look in light and dark."""

from collections.abc import Iterable
from xml.sax.saxutils import escape

WIDTH = 480  # one that is shrunk to a phone's can still be read
LOOK = """
  text { font: 13px sans-serif; fill: #1f2a36; } .small { font-size: 12px; fill: #4d5b69; }
  .strong { font-weight: bold; } .middle { text-anchor: middle; } .end { text-anchor: end; }
  .ground { fill: #f7f9fb; stroke: #c9d2db; } .grid { stroke: #dde3e9; } .axis { stroke: #7d8a98; }
"""
DARK_LOOK = """
    text { fill: #e3e9ef; } .small { fill: #b3bfca; } .ground { fill: #161c23; stroke: #38434e; }
    .grid { stroke: #2b343d; } .axis { stroke: #8896a4; }
"""


def svg(title: str, height: float, body: Iterable[str], look: str = "", dark_look: str = "", width: int = WIDTH) -> str:
    """A picture; what it has of its own look stands behind the common one."""
    style = f"{LOOK}{look}  @media (prefers-color-scheme: dark) {{{DARK_LOOK}{dark_look}  }}\n"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" viewBox="0 0 {width} {height:g}" role="img">'
        f"<title>{escape(title)}</title><style>{style}</style>\n"
        f'<rect class="ground" x="0.5" y="0.5" width="{width - 1}" height="{height - 1:g}" rx="8"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def line(x0: float, y0: float, x1: float, y1: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>'
