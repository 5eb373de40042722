"""`gva import`: a Llama-like checkpoint as a GvaForCausalLM with grouped-query attention and the same logits."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from gva.config import GvaConfig
from gva.convert.families import config_of
from gva.convert.source import Source, open_source
from gva.model import GvaForCausalLM, shapes_for
from gva.run.atomic import new_folder
from gva.run.files import FolderError
from gva.weights import INDEX, WEIGHTS, misfits, write_sums

SHARD_BYTES = 4 * 2**30  # what is in memory at a time
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def import_checkpoint(path: Path, out: Path, dtype: torch.dtype | None = None) -> tuple[GvaConfig, bool]:
    """Write `out`, which must not be there yet, from a HuggingFace folder or a GGUF file, with the weights in `dtype`
    or as they are stored. Returns the config, and whether a tokenizer came along."""
    source = open_source(path)
    try:
        config = config_of(source.config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    names = _check_tensors(source, config, path)
    config.architectures, config.dtype = [GvaForCausalLM.__name__], dtype or source.dtype
    with new_folder(out) as folder:
        _write(folder, (_cast(source, name, config.dtype) for name in tqdm(names, disable=not sys.stderr.isatty())))
        write_sums(folder)
        config.save_pretrained(folder)
        has_tokenizer = source.save_companions(folder)
    return config, has_tokenizer


def _check_tensors(source: Source, config: GvaConfig, path: Path) -> list[str]:
    """The names of the tensors to take over, if they are those that the config calls for."""
    wanted = shapes_for(config)
    given = dict(source.shapes)
    tied = config.tie_word_embeddings and given.pop(_HEAD, ())
    if tied and not torch.equal(source.load(_HEAD), source.load(_EMBEDDING)):
        raise FolderError(
            f"{path}: {_HEAD} differs from the embedding, though tie_word_embeddings=True; correct its config.json"
        )
    if wrong := misfits(wanted, given):
        raise FolderError(f"{path}: cannot be imported with the same logits: {wrong}")
    return list(wanted)


def _cast(source: Source, name: str, dtype: torch.dtype) -> tuple[str, Tensor]:
    tensor = source.load(name).to(dtype).contiguous()
    if not tensor.isfinite().all():
        raise FolderError(
            f"{name} has weights that are not numbers in {dtype}; copy the checkpoint again, or give --dtype"
        )
    return name, tensor


def _write(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Safetensors files as large as memory is to be used, and their index where there are several."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = size = 0

    def put() -> None:
        save_file(held, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > SHARD_BYTES:
            put()
            size = 0
        held[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    put()
    if len(shards) == 1:
        (folder / "part-0").rename(folder / WEIGHTS)
        return
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for number, file in enumerate(files):
        (folder / f"part-{number}").rename(folder / file)
    index = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2) + "\n")
