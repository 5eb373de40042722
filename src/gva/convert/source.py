"""A trained checkpoint to read from: a HuggingFace folder, or a GGUF file (gguf.py). Tensors have the names of
transformers' Llama and are read one at a time, so that no model need fit into memory."""

import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from gva.convert.families import FAMILIES
from gva.run.files import FolderError, read_object, to_copy
from gva.weights import CODELESS, WEIGHTS, shards_of, told, verify_folder

# What a folder holds besides config and weights that goes with the model.
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
              "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json")  # fmt: skip
_LICENCES = ("LICENSE*", "NOTICE*", "USE_POLICY*")
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _FLOATS.values()}
_OLD_BUFFERS = "rotary_emb.inv_freq"  # which early Llama checkpoints stored, and nobody reads


class Source(Protocol):
    """`config`: the fields of its transformers config. `shapes`: of every tensor. `dtype`: of its weights."""

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype

    def load(self, name: str) -> Tensor: ...

    def save_companions(self, folder: Path) -> bool:
        """Write tokenizer, chat template and generation config into a folder; says whether there is a tokenizer."""
        ...


def open_source(path: Path) -> Source:
    """Whatever is at `path`, its headers alone being read."""
    if path.is_file():
        from gva.convert.gguf import GgufFile

        return GgufFile(path)
    if not (path / "config.json").is_file():
        held = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; give the file itself, {path / held[0]}" if held else ""
        raise FileNotFoundError(f"{path}: no folder with a config.json, and no GGUF file{hint}")
    return Folder(path)


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        stored = read_object(path / "config.json", "copy the checkpoint again")
        named = stored.get("dtype") or stored.get("torch_dtype")
        if named not in (None, *_DTYPES):
            raise FolderError(f"{path / 'config.json'}: dtype={named!r}: must be one of {list(_DTYPES)}")
        verify_folder(path)
        # Of a family that we know, transformers fills in what the file leaves to its defaults.
        known = stored.get("model_type") in FAMILIES
        with told(path):
            self.config = AutoConfig.from_pretrained(path, **CODELESS).to_dict() if known else stored
        self.files: dict[str, Path] = {}
        self.shapes = {}
        kinds = {}
        for file in shards_of(path) or [WEIGHTS]:
            if not (path / file).is_file():
                raise FileNotFoundError(
                    f"{path / file}: no safetensors there; save the checkpoint again with transformers' save_pretrained"
                )
            with safe_open(to_copy(path / file), "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no dict
                    self.files[name], entry = path / file, tensors.get_slice(name)
                    self.shapes[name], kinds[name] = tuple(entry.get_shape()), entry.get_dtype()
        self.shapes = {name: shape for name, shape in self.shapes.items() if not name.endswith(_OLD_BUFFERS)}
        for name in self.shapes:
            if kinds[name] not in _FLOATS:
                raise FolderError(f"{self.files[name]}: {name} is {kinds[name]}: must be one of {list(_FLOATS)}")
        self.dtype = _FLOATS[next(iter(kinds.values()), "F32")] if named is None else _DTYPES[named]

    def load(self, name: str) -> Tensor:
        with safe_open(self.files[name], "pt") as tensors:
            return tensors.get_tensor(name)

    def save_companions(self, folder: Path) -> bool:
        patterns = (*_TOKENIZER, *_LICENCES, "generation_config.json")
        for file in (file for pattern in patterns for file in self.path.glob(pattern)):
            shutil.copyfile(to_copy(file), folder / file.name)
        if not (folder / "generation_config.json").is_file():
            usual = GenerationConfig.from_model_config(AutoConfig.from_pretrained(self.path, **CODELESS))
            usual.save_pretrained(folder)
        held = [name for name in _TOKENIZER if (folder / name).is_file()]
        if held and "tokenizer.json" not in held:  # a slow one; transformers makes a fast one of it
            AutoTokenizer.from_pretrained(self.path, **CODELESS).save_pretrained(folder)
        return bool(held)
