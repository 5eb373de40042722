"""The folder of a run: whose it is, and that only one process group writes to it."""

import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import gva
from gva.config import GvaConfig
from gva.data.shards import TokenDataset
from gva.run.atomic import write_atomically
from gva.train.recipe import Recipe

RUN = "run.json"


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the folder for this process; the lock goes with it, however it ends."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BlockingIOError(f"{out}: another process is training here; stop it, or give another --out") from None
        yield


def claim(out: Path, config: GvaConfig, recipe: Recipe, train_set: TokenDataset, valid_set: TokenDataset) -> None:
    """Record what this run is, or refuse to go on with another run's checkpoints."""
    identity = identity_of(config, recipe, train_set, valid_set)
    refuse_another(out, identity)
    versions = {"gva": gva.__version__, "torch": torch.__version__, "commit": commit()}
    record = {"identity": identity, "recipe": asdict(recipe), "versions": versions}
    write_atomically(out / RUN, json.dumps(record, indent=2))


def commit() -> str:
    """The commit of the sources: GVA_COMMIT where a copy without git is told it, else what git says of the working
    tree, else unknown, as in an installed package."""
    if told := os.environ.get("GVA_COMMIT"):
        return told
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return "unknown"
    words = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    with suppress(OSError):
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return "unknown"


def identity_of(
    config: GvaConfig, recipe: Recipe, train_set: TokenDataset, valid_set: TokenDataset
) -> dict[str, dict[str, Any]]:
    """What makes a run this run and no other: the model, the recipe and the data."""
    model = {k: v for k, v in config.to_dict().items() if k not in ("transformers_version", "dtype", "architectures")}
    data = {"train": train_set.fingerprint, "valid": valid_set.fingerprint}
    return json.loads(json.dumps({"model": model, "recipe": recipe.identity(), "data": data}))


def refuse_another(out: Path, identity: dict[str, Any]) -> None:
    """Raise ValueError if the folder holds a run that differs from this one, naming what differs."""
    record = out / RUN
    if not record.is_file():
        return
    changed = differences(json.loads(record.read_text())["identity"], identity)
    if changed:
        told = "; ".join(f"{name}: {theirs!r} -> {ours!r}" for name, (theirs, ours) in changed.items())
        raise ValueError(
            f"{out}: holds a run that differs in {told}; give the same settings to resume it, or another --out"
        )


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The leaves in which two identities differ, by their dotted names, sorted."""
    a, b = _flatten(theirs), _flatten(ours)
    return {name: (a.get(name), b.get(name)) for name in sorted(a | b) if a.get(name) != b.get(name)}


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, value in tree.items() for k, v in _flatten(value, f"{prefix}.{key}".strip(".")).items()}
