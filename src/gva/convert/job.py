"""`gva convert`: from a folder to a folder."""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from gva import __version__
from gva.config import GvaConfig
from gva.convert.converter import Conversion, Request, mean_loss
from gva.convert.record import Record, card
from gva.convert.source import Folder
from gva.convert.targets import MAKERS
from gva.convert.text import read_text
from gva.data.publish import CARD
from gva.diagnostics import cache_scalars_per_token_per_layer
from gva.errors import check, check_choice
from gva.model import GvaForCausalLM, load_whole
from gva.run.atomic import new_folder, write_atomically
from gva.run.files import read_object
from gva.run.folder import commit, differences, locked
from gva.weights import WEIGHTS, fingerprint, shards_of

ASKED, RECORD = "asked.json", "conversion.json"


def convert(
    source: Path,
    out: Path,
    to: str,
    cache: str,
    calibrate: list[Path],
    held_out: list[Path],
    tokens: int,
    length: int,
    search_tokens: int,
    slice: int | None = None,
    device: str | None = None,
) -> Record:
    """Write `out`: the model, its tokenizer, conversion.json and a card. What a stopped conversion had found lies
    beside it, hidden, and the same call goes on from there."""
    config = _config(source)
    limit = config.max_position_embeddings
    check(1 < length <= limit, "length", length, f"must lie between 2 and max_position_embeddings={limit}")
    check(search_tokens >= length, "search_tokens", search_tokens, f"must be at least one sequence, {length}")
    scalars = _scalars(cache, config)
    splits = MAKERS[to].splits(config, scalars)
    if slice is not None:
        check_choice("slice", slice, [split.slice for split in splits])
    calibration, unseen = read_text(calibrate, held_out, source, length, tokens)
    request = Request(to, scalars, calibration, max(1, search_tokens // length), slice)
    asked = {
        "source": {"folder": source.resolve().name, "fingerprint": _fingerprint(source)},
        "to": to,
        "cache": scalars,
        "slice": slice,
        "length": length,
        "search_tokens": search_tokens,
        "calibration": _tokens(calibration),
        "held_out": _tokens(unseen),
    }
    with new_folder(out) as folder, locked(_beside(out), "converting"):
        _claim(_beside(out), asked)
        model = load_whole(source, dtype=torch.float32)
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval().requires_grad_(False)
        conversion = Conversion(model, request, _beside(out), say=lambda line: print(line, file=sys.stderr))
        conversion.calibrate()
        splits = conversion.search()
        converted = conversion.convert(splits)
        stages = {"source": model, "converted": converted}
        if (cut := conversion.only_cut(splits)) is not None:
            stages = {"source": model, "rotation cut": cut, "converted": converted}
        texts = {"calibration": calibration[-request.searched :], "held out": unseen}
        record = Record(
            asked,
            [split._asdict() for split in splits],
            {name: {text: mean_loss(one, on) for text, on in texts.items()} for name, one in stages.items()},
            {"source": measured_cache(model), "converted": measured_cache(converted)},
            conversion.losses,
            {"gva": __version__, "torch": torch.__version__, "commit": commit()},
        )
        converted.to(config.dtype).save_pretrained(folder)
        Folder(source).save_companions(folder)
        write_atomically(folder / RECORD, json.dumps(record.written(), indent=2))
        write_atomically(folder / CARD, card(record, converted.config))
    shutil.rmtree(_beside(out))
    return record


def measured_cache(model: GvaForCausalLM) -> float:
    """Scalars per token and layer that a cache of transformers holds after a forward pass."""
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.ones(1, 8, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    return cache_scalars_per_token_per_layer(cache)


def _config(source: Path) -> GvaConfig:
    if not (source / "config.json").is_file():
        raise FileNotFoundError(f"{source}: no model folder with a config.json; gva import makes one of a checkpoint")
    config = GvaConfig.from_dict(read_object(source / "config.json", "copy the checkpoint again"))
    plain = config.attention == "gqa" and not config.query_norm and config.layers is None
    why = "must be grouped-query attention, alike in all layers and without a query norm"
    check(plain, "attention", config.attention, f"{source}: {why}")
    return config


def _scalars(cache: str, config: GvaConfig) -> int:
    """Of '208', or of '54%' of the source's rounded down to what kernels like."""
    whole = config.row.scalars
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", cache)
    check(found is not None, "cache", cache, "must be scalars per token and layer, or percent of the source's")
    assert found is not None
    scalars = int(float(found[1]) / 100 * whole) // 16 * 16 if found[2] else int(float(found[1]))
    check(0 < scalars < whole, "cache", cache, f"must be less than the {whole} that the source caches")
    return scalars


def _beside(out: Path) -> Path:
    return out.with_name(f".{out.name}.converting")


def _claim(folder: Path, asked: dict[str, Any]) -> None:
    """What is found here is for this request, and for no other."""
    path = folder / ASKED
    if path.is_file() and (changed := differences(read_object(path, f"remove {folder}"), asked, {})):
        told = "; ".join(f"{name}: {theirs!r} -> {ours!r}" for name, (theirs, ours) in changed.items())
        raise ValueError(
            f"{folder}: holds a stopped conversion that differs in {told}; remove it, or give the same to go on"
        )
    write_atomically(path, json.dumps(asked, indent=2))


def _fingerprint(folder: Path) -> str:
    return fingerprint(
        (folder / "config.json").read_bytes(), [folder / name for name in shards_of(folder) or [WEIGHTS]]
    )


def _tokens(sequences: torch.Tensor) -> dict[str, Any]:
    return {"tokens": sequences.numel(), "sha256": hashlib.sha256(sequences.numpy().tobytes()).hexdigest()[:16]}
