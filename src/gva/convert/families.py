"""Which checkpoints of others are a GvaForCausalLM with grouped-query attention, and what speaks against the rest."""

from typing import Any

from gva.config import GvaConfig

FAMILIES = ("llama", "mistral", "qwen2")  # SmolLM2 and Llama 2 and 3 are "llama"

_SAME = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps",
         "max_position_embeddings", "rope_parameters", "tie_word_embeddings")  # fmt: skip

# Fields that change what a model computes, and what they stand for. None, False and 1 change nothing.
_FOREIGN = {
    "kv_lora_rank": "a latent attention (MLA)",
    "num_local_experts": "experts",
    "num_experts": "experts",
    "n_routed_experts": "experts",
    "attn_logit_softcapping": "scores with a soft cap",
    "final_logit_softcapping": "logits with a soft cap",
    "use_qk_norm": "norms of queries and keys",
    "qk_layernorm": "norms of queries and keys",
    "no_rope_layers": "layers without rotation",
    "partial_rotary_factor": "a rotation of part of each head",
    "embedding_multiplier": "a factor on embeddings",
    "residual_multiplier": "a factor on what a layer adds",
    "attention_multiplier": "a factor on scores",
    "logits_scaling": "a factor on logits",
    "logit_scale": "a factor on logits",
    "quantization_config": "quantised weights; give the checkpoint in bfloat16 or float32, or a GGUF file",
}
# What no field of their configs tells.
_BY_TYPE = {
    "qwen3": "norms of queries and keys",
    "qwen3_moe": "norms of queries and keys, and experts",
    "gemma": "norms and embeddings with factors of their own",
    "gemma2": "norms and embeddings with factors of their own",
    "gemma3_text": "norms of queries and keys",
    "olmo2": "norms of queries and keys, and norms behind each block",
    "phi3": "projections in one matrix",
    "smollm3": "layers without rotation",
}


def config_of(source: dict[str, Any]) -> GvaConfig:
    """The config of a checkpoint in our terms. `source` has the fields of its transformers config, none left out.
    Raises ValueError that names each field that cannot be represented, and its value."""
    found = _obstacles(source)
    if found:
        raise ValueError(f"cannot be imported with the same logits: {'; '.join(found)}")
    family = source["model_type"]
    biased = family == "llama" and bool(source.get("attention_bias"))
    return GvaConfig(
        attention="gqa",
        num_value_groups=source["num_key_value_heads"],
        value_head_dim=source.get("head_dim"),
        **{name: source[name] for name in _SAME},
        rope_frequencies=source.get("rope_frequencies"),
        qkv_bias=biased or family == "qwen2",
        output_bias=biased,
        mlp_bias=family == "llama" and bool(source.get("mlp_bias")),
        **{name: source.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def _obstacles(source: dict[str, Any]) -> list[str]:
    kind, rope = source.get("model_type"), source.get("rope_parameters") or {}
    fields = {**source, **{name: rope[name] for name in ("partial_rotary_factor",) if name in rope}}
    found = [f"{name}={_short(fields[name])} ({what})" for name, what in _FOREIGN.items() if _differs(fields.get(name))]
    if kind == "gva":
        found.append("model_type='gva' (one of ours already; gva convert takes it as it is)")
    elif kind not in FAMILIES:
        found.append(f"model_type={kind!r} ({_BY_TYPE.get(str(kind), 'not a family that is known to be Llama-like')})")
    activation = source.get("hidden_act", "silu")
    if activation != "silu":
        found.append(f"hidden_act={activation!r} (the feed-forward has silu)")
    return found + _windows(source)


def _windows(source: dict[str, Any]) -> list[str]:
    """A window as long as the context never cuts anything off."""
    window, context = source.get("sliding_window"), source.get("max_position_embeddings") or 0
    off = source.get("use_sliding_window") is False or not window or window >= context
    if off and all(kind == "full_attention" for kind in source.get("layer_types") or []):
        return []
    remedy = "where shorter texts are enough, lower max_position_embeddings in its config.json to the window"
    return [f"sliding_window={window!r} (of max_position_embeddings={context}; {remedy})"]


def _differs(value: Any) -> bool:
    """Lists say for each layer whether it is as usual."""
    return not all(one in (1, 1.0, True) for one in value) if isinstance(value, list) else value not in (None, False, 1)


def _short(value: Any) -> str:
    told = repr(value)
    return told if len(told) <= 60 else f"{told[:57]}..."
