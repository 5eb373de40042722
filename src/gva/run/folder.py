"""The folder of a run: what lies in it, whose it is, and that only one process group writes to it."""

import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import gva
from gva.run.atomic import write_atomically
from gva.run.files import FolderError, opened, read_object

RUN = "run.json"  # what the run is
CHECKPOINTS = "checkpoints"  # what it goes on from
MODEL = "model"  # what it ends with: a HuggingFace folder

_BEFORE = {"data", "runs"}  # what may lie in a folder before it is a run's or a comparison's

# What of a run's identity others read, and how it is written there.
_NEEDED: dict[str, tuple[type, ...]] = {
    **{f"recipe.{name}": (int,) for name in ("seed", "length", "global_batch")},
    "recipe.lr": (int, float),
    **{f"data.{split}": (str,) for split in ("train", "valid")},
}


def model_of(place: Path) -> Path:
    """Where the model lies that a run ended with; any other place is what it is."""
    return place / MODEL if (place / RUN).is_file() and (place / MODEL).is_dir() else place


@contextmanager
def locked(out: Path, doing: str = "training") -> Iterator[None]:
    """Hold the folder for this process; the lock goes with it, however it ends."""
    out.mkdir(parents=True, exist_ok=True)
    with opened(out / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BlockingIOError(f"{out}: another process is {doing} here; stop it, or give another --out") from None
        yield


def refuse_foreign(out: Path, marks: str = RUN) -> None:
    """Raise FileExistsError if there is something at `out` that is none of ours: a file, or a folder of other files.
    `marks` is the pattern of what makes a folder ours. A folder in it that is empty is what a kill may have left."""

    def visible(folder: Path) -> list[Path]:
        return [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]

    if out.is_dir():
        full = [path.name for path in visible(out) if not path.is_dir() or visible(path)]
        others = [name for name in full if name not in _BEFORE]
        if not others or any(out.glob(marks)):
            return
        told = f"a folder of other files ({', '.join(others[:3])}{', ...' if len(others) > 3 else ''})"
    elif out.exists() or out.is_symlink():
        told = "not a folder"
    else:
        return
    raise FileExistsError(f"{out}: {told}; give another --out, a new or an empty folder or one that was begun here")


def claim(out: Path, identity: dict[str, Any], defaults: dict[str, Any], facts: dict[str, Any]) -> None:
    """Record what this run is, with what else is known of it, or refuse to go on with another run's checkpoints."""
    import torch  # for its version alone

    refuse_another(out, identity, defaults)
    if (out / RUN).is_file() and (before := read_run(out).get("tokenizer")) not in (None, facts["tokenizer"]):
        raise ValueError(
            f"{out}: holds a run with another tokenizer ({before} -> {facts['tokenizer']}); give the data that it was "
            "trained on, or another --out"
        )
    versions = {"gva": gva.__version__, "torch": torch.__version__, "commit": commit()}
    write_atomically(out / RUN, json.dumps({"identity": identity, **facts, "versions": versions}, indent=2))


def read_run(out: Path) -> dict[str, Any]:
    """What a run recorded of itself: its identity (model, recipe, data), the whole recipe, versions, the fingerprint of
    its tokenizer."""
    remedy = "it says what the run is, so copy it again, or train in another --out"
    record = read_object(out / RUN, remedy)
    found = _flatten(record.get("identity"))
    fine = all(type(found.get(name)) in kinds for name, kinds in _NEEDED.items())
    if not fine or not any(name.startswith("model.") for name in found):
        raise FolderError(f"{out / RUN}: without the model, the recipe with its seed, or the data of a run; {remedy}")
    return record


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


def refuse_another(out: Path, identity: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raise ValueError if the folder holds a run that differs from this one, naming what differs."""
    if not (out / RUN).is_file():
        return
    changed = differences(read_run(out)["identity"], identity, defaults)
    if changed:
        told = "; ".join(f"{name}: {theirs!r} -> {ours!r}" for name, (theirs, ours) in changed.items())
        raise ValueError(
            f"{out}: holds a run that differs in {told}; give the same settings to resume it, or another --out"
        )


def differences(theirs: dict[str, Any], ours: dict[str, Any], defaults: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The leaves in which two identities differ, by their dotted names, sorted. One that an identity does not have,
    being older than it, had its default."""
    usual = _flatten(defaults)
    a, b = {**usual, **_flatten(theirs)}, {**usual, **_flatten(ours)}
    return {name: (a.get(name), b.get(name)) for name in sorted(a | b) if a.get(name) != b.get(name)}


def contradictions(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The leaves that both identities have and that differ, by their dotted names, sorted."""
    a, b = _flatten(theirs), _flatten(ours)
    return {name: (a[name], b[name]) for name in sorted(a.keys() & b.keys()) if a[name] != b[name]}


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, value in tree.items() for k, v in _flatten(value, f"{prefix}.{key}".strip(".")).items()}
