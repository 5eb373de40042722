"""Configs of other families, as `gva cost` counts them: read as transformers reads them, class defaults among them, and
held against transformers' own model on no device, which shows what it caches and how many parameters it has."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gva.config import MOST_LAYERS, GvaConfig
from gva.errors import check, nearest

CLOSE = 1e-3  # biases and further norms, which some families have, come to less than this part of all parameters
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# How far positions reach changes no size, and some ways to do it look at numbers, which a model on no device lacks.
ROTATION = ("rope_scaling", "rope_parameters")
# What a family calls its own, where a reader wants the reason rather than the numbers that do not fit.
KINDS = {
    "kv_lora_rank": "multi-head latent attention",
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "mamba_d_state": "state-space layers",
    "ssm_state_size": "state-space layers",
    "state_size": "state-space layers",
    "linear_num_value_heads": "linear attention",
}


def read(source: Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[GvaConfig, list[int | None]]:
    """A config.json, some of its fields replaced, as grouped-query attention of ours, and how many tokens each layer
    keeps, None for all of them. Refused by name where our figures would be wrong."""
    text = _text_config(source, overrides)
    told = f"model_type={text.model_type!r}"
    kinds = sorted({kind for name, kind in KINDS.items() if _number(text, name, told)})
    if kinds:
        raise ValueError(f"{told}: has {' and '.join(kinds)}; only dense models with keys and values can be counted")
    if getattr(text, "is_decoder", None) is False or getattr(text, "is_encoder_decoder", False):
        raise ValueError(f"{told}: an encoder, or has one; only decoders, which cache what they read, can be counted")
    sizes = {name: _number(text, name, told) for name in SIZES}
    if None in sizes.values():
        raise ValueError(f"{told}: has no {', '.join(name for name in sizes if sizes[name] is None)}; not counted")
    config = GvaConfig(
        **sizes,
        num_value_groups=_number(text, "num_key_value_heads", told) or sizes["num_attention_heads"],
        value_head_dim=_number(text, "head_dim", told),
        max_position_embeddings=_number(text, "max_position_embeddings", told) or 2**31,
        tie_word_embeddings=bool(text.tie_word_embeddings),
        attention="gqa",
    )
    return config, _held_against(config, text, told)


def _number(text: Any, name: str, told: str) -> int | None:
    """A size that all layers share, if the family has it."""
    try:
        value = getattr(text, name, None)
    except RuntimeError:  # transformers': it has one for each layer
        value = []
    if value is not None and not isinstance(value, int):
        raise ValueError(f"{told}: {name} is not the same in every layer; not counted")
    return value


def _text_config(source: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """The config of the language model, nested or not, in transformers' own class."""
    from transformers import AutoConfig, __version__

    nested = isinstance(source.get("text_config"), Mapping)
    merged = {**source["text_config"], **overrides} if nested else {**source, **overrides}
    merged = {name: value for name, value in merged.items() if name not in ROTATION}
    given = {**source, "text_config": merged} if nested else merged
    kind, layers = given.pop("model_type", None), merged.get("num_hidden_layers")
    if isinstance(layers, int):  # of each of which transformers would make a list's entry, and a layer
        check(layers <= MOST_LAYERS, "num_hidden_layers", layers, f"must be {MOST_LAYERS:,} at most")
    why = f"transformers {__version__}, whose models say what is cached, has none of this name"
    try:
        text = AutoConfig.for_model(str(kind), **given).get_text_config(decoder=True)
    except Exception as error:  # each family's class checks itself in its own way
        unknown = "Unrecognized model" in str(error)
        raise ValueError(f"model_type={kind!r}: {why if unknown else ' '.join(str(error).split())}") from None
    known = {*(f.name for f in fields(text)), *text.attribute_map, "rope_theta"}
    for name in overrides:
        check(name in known, "--set", name, f"model_type={text.model_type!r} has no such field{nearest(name, known)}")
    return text


def _held_against(config: GvaConfig, text: Any, told: str) -> list[int | None]:
    """The windows of transformers' model, which must cache and weigh what we count."""
    from gva import cost

    try:
        layers, weights = _measured(text)
    except Exception as error:  # whatever a model that was never meant to run on no device raises
        raise ValueError(f"{told}: transformers' model does not run without weights ({error}); not counted") from None
    shape = (1, config.num_value_groups, 1, config.value_head_dim)
    for index, (keys, values, _) in enumerate(layers):
        if not keys == values == shape:
            found = "no keys and values" if keys is None else f"keys {list(keys)} and values {values and list(values)}"
            raise ValueError(f"{told}: layer {index} caches {found} of a token, not {list(shape)} of both; not counted")
    counted = cost.parameters(config)["total"]
    if len(layers) != config.num_hidden_layers or abs(counted / weights - 1) > CLOSE:
        raise ValueError(
            f"{told}: transformers' model has {weights / 1e6:,.1f}M parameters; attention, gated feed-forward and "
            f"embeddings of its sizes have {counted / 1e6:,.1f}M. What else it is made of cannot be counted"
        )
    return [window for *_, window in layers]


def _measured(text: Any) -> tuple[list[tuple[Any, Any, int | None]], int]:
    """Shapes of keys and values and the window of each layer after one token, and the parameters, on no device."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.device("meta"), torch.no_grad():
            model = AutoModelForCausalLM.from_config(text, dtype=torch.bfloat16).eval()
            cache = DynamicCache(config=text)
            model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    finally:
        logging.set_verbosity(before)
    tensors = [[getattr(layer, name, None) for name in ("keys", "values")] for layer in cache.layers]
    shapes = [[None if tensor is None else tuple(tensor.shape) for tensor in pair] for pair in tensors]
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    layers = [(keys, values, window) for (keys, values), window in zip(shapes, windows, strict=True)]
    return layers, sum(parameter.numel() for parameter in model.parameters())
