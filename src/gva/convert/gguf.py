"""A GGUF file of the llama or qwen2 architecture, dequantised tensor by tensor."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from gva.run.files import FolderError
from gva.weights import CODELESS

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_FACTORS = "rope_freqs.weight"  # what each pair's frequency is divided by: llama3's rope type, written out


class GgufFile:
    dtype = torch.float32  # so that what a block of integers and its scale stand for is kept exactly

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError:
            raise ValueError(
                f"{path}: needs the package gguf; pip install 'grouped-value-attention[convert]'"
            ) from None
        self.path = path
        try:
            reader = GGUFReader(path)
            self.fields = {name: field.contents() for name, field in reader.fields.items() if len(field.data) < 64}
        except (ValueError, IndexError, KeyError, OSError) as error:
            raise FolderError(f"{path}: not a whole GGUF file ({error}); copy it again") from None
        if self.fields.get("split.count", 0) > 1:
            raise FolderError(f"{path}: one of {self.fields['split.count']} parts; merge them with llama-gguf-split")
        self.arch = self.fields.get("general.architecture")
        stored = {tensor.name: tensor for tensor in reader.tensors}
        factors = stored.pop(_FACTORS, None)
        self.tensors = {_renamed(name): tensor for name, tensor in stored.items()}
        self.shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self.tensors.items()}
        self.config = self._config(None if factors is None else _values(factors))

    def load(self, name: str) -> Tensor:
        values = _values(self.tensors[name])
        turned = re.search(r"self_attn\.([qk])_proj", name)
        if self.arch != "llama" or turned is None:
            return values
        # Of each head, llama.cpp keeps the two dimensions of a pair side by side, we keep first halves before second.
        heads = self.config["num_attention_heads" if turned[1] == "q" else "num_key_value_heads"]
        return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(values.shape)

    def save_companions(self, folder: Path) -> bool:
        tokenizer = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name, **CODELESS)
        tokenizer.save_pretrained(folder)
        GenerationConfig(**{name: self.config[name] for name in self.config if name.endswith("_token_id")}
                         ).save_pretrained(folder)  # fmt: skip
        return True

    def _config(self, factors: Tensor | None) -> dict[str, Any]:
        """What the metadata says, under the names of transformers."""

        def told(name: str, default: Any = None) -> Any:
            return self.fields.get(f"{self.arch}.{name}", default)

        config: dict[str, Any] = {ours: told(theirs) for ours, theirs in _SIZES.items()}
        if any(value is None for value in config.values()):
            raise FolderError(f"{self.path}: a file of architecture {self.arch!r} without {_missing(config)}")
        heads = config["num_attention_heads"]
        width = told("attention.key_length", config["hidden_size"] // heads)
        base = told("rope.freq_base", 10000.0)
        kind = told("rope.scaling.type", "none")
        rope = {"rope_type": "default" if kind == "none" else f"{kind} (of GGUF)", "rope_theta": base}
        if kind == "linear":
            rope |= {"rope_type": "linear", "factor": told("rope.scaling.factor")}
        tokens = {f"{name}_token_id": self.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
        turn = self.fields.get("tokenizer.ggml.eot_token_id")  # what ends an answer of some instruct models
        if turn is not None and turn != tokens["eos_token_id"]:
            tokens["eos_token_id"] = [tokens["eos_token_id"], turn]
        return config | tokens | {
            "model_type": self.arch,
            "vocab_size": self.shapes.get("model.embed_tokens.weight", (0,))[0],
            "num_key_value_heads": told("attention.head_count_kv", heads),
            "head_dim": width,
            "pad_token_id": self.fields.get("tokenizer.ggml.padding_token_id"),
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self.shapes,
            "mlp_bias": "model.layers.0.mlp.up_proj.bias" in self.shapes,
            "rope_parameters": rope,
            "rope_frequencies": None if factors is None else _frequencies(base, width, factors),
            "partial_rotary_factor": told("rope.dimension_count", width) / width,
            "sliding_window": told("attention.sliding_window"),
            "num_experts": told("expert_count") or None,
            **{name: told(name) for name in ("logit_scale",)},
        }  # fmt: skip


def _renamed(name: str) -> str:
    """The name in transformers' Llama; one that it has not keeps its own, and is refused as such."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _NAMES:
        return name
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{_NAMES[match[2]]}.{match[3]}"


def _values(tensor: Any) -> Tensor:
    from gguf import dequantize

    return torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)


def _frequencies(base: float, width: int, factors: Tensor) -> list[float]:
    inverse = 1.0 / torch.pow(base, torch.arange(0, width, 2, dtype=torch.float32) / width)
    return (inverse / factors).tolist()


def _missing(config: dict[str, Any]) -> str:
    return ", ".join(_SIZES[name] for name, value in config.items() if value is None)
