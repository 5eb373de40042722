"""Hooks of mkdocs: the site is made of the files that the repository shows anyway, README.md its first page."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

README = Path(__file__).parents[1] / "README.md"
PAGE = re.compile(r"`docs/([\w-]+\.md)`")


def on_files(files: Files, config: Any) -> Files:
    text = re.sub(r"\]\(docs/", "](", README.read_text(encoding="utf-8"))
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return PAGE.sub(r"[`docs/\1`](\1)", markdown)
