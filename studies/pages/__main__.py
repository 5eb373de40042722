"""Writes what docs and README say of the studies, docs/results.md foremost, from what was measured:

    python studies/pages

A page is the file of its name beside this one. Prose is written there; whatever was measured stands in {{ }}.
"""

from __future__ import annotations

import pathlib
import sys

import jinja2

from gva.report.tables import fill

HERE = pathlib.Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
sys.path += [str(DOCS), str(DOCS.parent / "benchmarks")]

import drawn  # noqa: E402
import figures  # noqa: E402

PARTS = {DOCS.parent / "README.md": "summary", DOCS / "converting.md": "zero shot"}  # made of NAME.table
MADE = "\n<!-- Made by python studies/pages from studies/pages/{name}: change it there. -->\n"


def pages() -> dict[pathlib.Path, str]:
    """Every file and what it should hold."""
    known = figures.known()
    written = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), undefined=jinja2.StrictUndefined, keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  (Markdown of our own)
    )  # fmt: skip
    found = {}
    for path in sorted(HERE.rglob("*.md")):
        name = path.relative_to(HERE).as_posix()
        found[DOCS / name] = written.get_template(name).render(known) + MADE.format(name=name)
    for page, table in PARTS.items():
        text = written.get_template(f"{page.stem}.table").render(known).strip()
        found[page] = fill(page.read_text(encoding="utf-8"), {table: text})
    pictures = {DOCS / "results" / f"{name}.svg": picture for name, picture in drawn.all_of(known).items()}
    return found | pictures


if __name__ == "__main__":
    for path, content in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
