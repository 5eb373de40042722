"""The weights of a HuggingFace folder: never half-written, and refused by name when something of them is missing or is
not what was written. Their sums lie beside them; a folder that others wrote has none."""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from gva.run.atomic import staging_folder
from gva.run.files import FolderError, inside, read_object
from gva.run.sums import checksum, comparing

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
SUMS = "model.sums.json"
# How commands open a folder with transformers: none of its Python, nor a question whose yes runs it; of its weights, no
# pickle, and no kernel that its config would fetch.
CODELESS = {"trust_remote_code": False}
AS_DATA = {**CODELESS, "use_safetensors": True, "attn_implementation": "sdpa"}


def verify_folder(folder: str | os.PathLike) -> None:
    """Raise OSError that names the file if a safetensors shard of a checkpoint is missing or truncated, or there are
    fewer tensors than layers in its config, and FolderError if its index names a file outside."""
    folder = Path(folder)
    index = folder / INDEX
    if index.is_file():
        names = shards_of(folder)
        if not names:
            raise OSError(f"{index}: not a readable shard index; copy the checkpoint again")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise OSError(
                f"{folder}: {len(missing)} of {len(names)} shards are missing ({', '.join(missing[:3])}"
                f"{', ...' if len(missing) > 3 else ''}); copy the checkpoint again"
            )
    else:
        names = [WEIGHTS] if (folder / WEIGHTS).is_file() else []
    tensors = sum(len(verify_shard(folder / name)) for name in names)
    if names and (folder / CONFIG).is_file():
        layers = read_object(folder / CONFIG, "copy the checkpoint again").get("num_hidden_layers")
        if isinstance(layers, int) and layers > tensors:  # to make them all would take for ever
            raise OSError(f"{folder}: {layers:,} layers in {CONFIG}, {tensors:,} tensors; copy the checkpoint again")


@contextmanager
def verified(folder: Path) -> Iterator[None]:
    """`verify_folder`, and while the block loads the weights their bytes are compared with their sums, if there are
    any. Raises OSError that names the file which is not what was written, whatever loading it came to."""
    verify_folder(folder)
    with comparing(folder, _sums(folder), folder / SUMS) as changed:
        try:
            yield
        finally:
            if told := changed.result():
                remedy = f"copy the checkpoint again, or remove {SUMS} if it was changed on purpose"
                raise OSError(f"{folder}: {told}; {remedy}")


def _sums(folder: Path) -> list[tuple[str, str]]:
    path, remedy = folder / SUMS, "copy the checkpoint again, or remove this file to load its weights unchecked"
    if not path.is_file():
        return []
    files = read_object(path, remedy).get("files")
    if not isinstance(files, dict) or not files.keys() >= set(shards_of(folder) or [WEIGHTS]):
        raise FolderError(f"{path}: without the sums of all weights; {remedy}")
    return sorted(files.items())


def write_sums(folder: Path) -> None:
    """Of the weights that this process has just written."""
    files = {file.name: checksum(file, mapped=True) for file in sorted(folder.glob("*.safetensors"))}
    (folder / SUMS).write_text(json.dumps({"files": files}, indent=2) + "\n")


def is_whole(folder: Path, unchanged: bool = False) -> bool:
    """Whether a checkpoint has its config and all of its weights, none of them cut short, or not even a bit changed."""
    try:
        with verified(folder) if unchanged else nullcontext():
            verify_folder(folder)
        weights = shards_of(folder) or (folder / WEIGHTS).is_file()
        return bool(read_object(folder / CONFIG, "")) and bool(weights)
    except (OSError, FolderError):
        return False


def fingerprint(config: bytes, files: Iterable[Path]) -> str:
    """Changes with any byte of a config and of the files of weights."""
    digest = hashlib.sha256(config)
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of every tensor in a folder, by its name."""
    files = [folder / name for name in shards_of(folder) or [WEIGHTS]]
    if not files[0].is_file():
        raise FileNotFoundError(f"{folder}: no file named {files[0].name}; copy the weights beside {CONFIG}")
    return {name: shape for file in files for name, shape in verify_shard(file).items()}


def misfits(wanted: dict[str, tuple[int, ...]], held: dict[str, tuple[int, ...]]) -> str:
    """What tensors that are held have instead of names and shapes that are wanted; nothing where they are the same."""
    wrong = [f"{name} is missing" for name in wanted if name not in held]
    wrong += [f"{name} has no place in such a model" for name in held if name not in wanted]
    shaped = {name: shape for name, shape in wanted.items() if held.get(name, shape) != shape}
    wrong += [f"{name} has the shape {held[name]}, not {shape}" for name, shape in shaped.items()]
    return "; ".join(wrong[:3]) + (f", and {len(wrong) - 3} more" if len(wrong) > 3 else "")


def verify_shard(path: Path) -> dict[str, tuple[int, ...]]:
    """Compare a shard's size with what its own header announces; reads the header alone. Returns the shapes of its
    tensors."""
    size = path.stat().st_size
    expected: int | None = None
    shapes: dict[str, tuple[int, ...]] = {}
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) == 8:
            (header_size,) = struct.unpack("<Q", prefix)
            if 8 + header_size <= size:
                try:
                    header = json.loads(file.read(header_size))
                    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
                    shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
                    ends = (entry["data_offsets"][1] for entry in entries.values())
                    expected = 8 + header_size + max(ends, default=0)
                except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
                    expected = None
    if expected is None:
        raise OSError(f"{path}: {size} bytes, not a whole safetensors file; copy the checkpoint again")
    if size != expected:
        raise OSError(f"{path}: {size} bytes where its header announces {expected}; copy the checkpoint again")
    return shapes


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """What a folder that may be a stranger's makes transformers stumble over, in one line."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise OSError(f"{folder}: cannot be loaded ({what}); copy it again") from error


@contextmanager
def replacing(folder: str | os.PathLike) -> Iterator[Path]:
    """A staging folder whose files move into `folder` once all are written. Old weights go first and what names the new
    ones comes last, so that a folder torn by a kill does not load, instead of loading half of each."""
    folder, last = Path(folder), (INDEX, WEIGHTS)
    with staging_folder(folder) as staging:
        yield staging
        if any(staging.glob("*.safetensors")):
            write_sums(staging)
        files = sorted(staging.iterdir(), key=lambda path: path.name in last)
        if any(path.name in last for path in files):
            for name in [*shards_of(folder), *last, SUMS]:  # read before any of them is gone
                (folder / name).unlink(missing_ok=True)
        for path in files:
            os.replace(path, folder / path.name)


def shards_of(folder: Path) -> list[str]:
    """The shards that a folder's index names, each a file of the folder; none if it has no readable index."""
    try:
        names = json.loads((folder / INDEX).read_text())["weight_map"].values()
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return []
    return sorted({inside(folder, name, folder / INDEX).name for name in names})
