"""The folder of a run: whose it is, and that only one process group writes to it."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import gva
from gva.config import GvaConfig
from gva.data.shards import TokenDataset, write_atomically
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
    model = {k: v for k, v in config.to_dict().items() if k not in ("transformers_version", "dtype", "architectures")}
    data = {"train": train_set.fingerprint, "valid": valid_set.fingerprint}
    identity = json.loads(json.dumps({"model": model, "recipe": recipe.identity(), "data": data}))
    record = out / RUN
    if record.is_file():
        theirs, ours = (_flatten(x) for x in (json.loads(record.read_text())["identity"], identity))
        changed = [f"{k}: {theirs.get(k)!r} -> {ours.get(k)!r}" for k in theirs | ours if theirs.get(k) != ours.get(k)]
        if changed:
            raise ValueError(
                f"{out}: holds a run that differs in {'; '.join(sorted(changed))}; give the same settings to resume "
                "it, or another --out"
            )
    versions = {"gva": gva.__version__, "torch": torch.__version__}
    write_atomically(
        record, json.dumps({"identity": identity, "recipe": asdict(recipe), "versions": versions}, indent=2)
    )


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, value in tree.items() for k, v in _flatten(value, f"{prefix}.{key}".strip(".")).items()}
