"""Small random checkpoints of others, as transformers saves them and as GGUF files."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SIZES = {
    "vocab_size": 98,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama 2": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 6, "rms_norm_eps": 1e-5}),
    "llama 3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3, "head_dim": 16, "rms_norm_eps": 1e-3}),
    "smollm2": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True, "rope_theta": 1e5}),
    "biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "yarn": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0,
                             "original_max_position_embeddings": 32}},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"sliding_window": 16, "tie_word_embeddings": True}),
}  # fmt: skip


def random_model(case: str, **overrides: Any) -> Any:
    """With biases and gains that are drawn too: of zeros and ones, one could not tell that they were taken over."""
    model_class, config_class, fields = CASES[case]
    model = model_class(config_class(**{**SIZES, **fields, **overrides})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def saved(folder: Path, case: str = "llama 3", dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    """A model in a folder, with a tokenizer that has a chat template."""
    model = random_model(case).to(dtype)
    model.save_pretrained(folder, **how)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), eos_token="t2")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    return model


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(98)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


# ---- GGUF ----

_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, model: Any, quantised: bool = False, factors: Any = None, **metadata: Any) -> None:
    """A model as llama.cpp's converter writes it: for the architecture llama, the rows of queries and keys permuted so
    that the two dimensions of a pair are neighbours."""
    import gguf

    config = model.config
    arch = "qwen2" if config.model_type == "qwen2" else "llama"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
    for name, value in metadata.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(f"{arch}.{name.replace('__', '.')}", value)
    _add_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _permuted(name, tensor, config) if arch == "llama" else tensor
        plain = values.numpy()
        if quantised and tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_gguf_name(name), gguf.quantize(plain, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), plain.copy())
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(f"t{i}" for i in range(96)), "t", "0"])
    writer.add_token_types([1] * 98)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_TENSORS[rest]}.{kind}"
    return f"{_TENSORS[stem]}.{kind}"


def _permuted(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    first, second = tensor.unflatten(0, (heads, -1)).chunk(2, dim=1)
    return torch.stack((first, second), dim=2).reshape(tensor.shape).contiguous()
