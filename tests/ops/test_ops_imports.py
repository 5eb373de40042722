"""Implementations never import one another: what two of them need lies beside them, who joins them above."""

import ast
from pathlib import Path

import pytest

from gva import ops

ROOT = Path(ops.__file__).parent
IMPLEMENTATIONS = ("reference", "triton", "cuda", "cpu")


def imports(file):
    """What a module of ours imports from beside `ops/__init__.py`, as the first word after `gva.ops.`."""
    package = ("gva", "ops", *file.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            found = [(*base, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [tuple(alias.name.split(".")) for alias in node.names]
        else:
            continue
        for name in found:
            if name[:2] == ("gva", "ops") and len(name) > 2:
                yield name[2]


def files_of(implementation):
    path = ROOT / implementation
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_implementations_never_import_one_another(implementation):
    others = set(IMPLEMENTATIONS) - {implementation}
    files = files_of(implementation)
    assert files
    for file in files:
        assert not others & set(imports(file)), file


def test_one_place_joins_them():
    """Beside it, only what has a single form: whether CUDA or C compiles here, merging by LSE, and the losses."""
    found = {}
    for file in ROOT.glob("*.py"):
        reached = set(IMPLEMENTATIONS) & set(imports(file))
        if reached and file.stem not in IMPLEMENTATIONS:
            found[file.stem] = reached
    single = {"backend": {"cuda", "cpu"}, "api": {"reference"}, "loss": {"triton"}, "distill": {"triton"}}
    assert found == {"dispatch": set(IMPLEMENTATIONS), **single}
