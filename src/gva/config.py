"""GvaConfig: one model, every attention. It fills in what it can derive and validates itself.

Symbols: H = num_attention_heads, G = num_value_groups, R = H / G, d_h = value_head_dim, d_r = rope_dim,
d_n the width of a content key, d_c = latent_dim.
"""

import copy
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from gva.attention import choices, class_of, names
from gva.attention.shape import Shape
from gva.errors import check, check_choice, nearest
from gva.presets import PRESETS, VARIANTS
from gva.remote import SavedWithCode

NOT_OURS = "not a checkpoint of this package; gva import takes it in, gva convert makes its cache smaller"
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
MOST_LAYERS = 4096  # so that a number in a stranger's file cannot keep a command at work for ever

# What a change of variant resets; everything else is the size of the model and stays.
VARIANT_FIELDS = (
    "attention",
    "positional",
    "rope_dim",
    "rope_allocation",
    "map_init",
    "query_norm",
    "latent_dim",
    "latent_norm",
    "rope_frequencies",
    "score_scale",
    "layers",
)

# What a layer may have otherwise than its model: all that its attention alone looks at. The heads are the model's.
LAYER_FIELDS = (
    *(name for name in VARIANT_FIELDS if name != "layers"),
    "num_value_groups",
    "value_head_dim",
    "rope_theta",
    "rope_parameters",
    "qkv_bias",
    "output_bias",
)

# Arguments that transformers takes besides the fields of a config, or writes into a config.json.
_TRANSFORMERS_EXTRAS = frozenset(
    {
        "model_type",
        "torch_dtype",
        "num_labels",
        "rope_scaling",
        "name_or_path",
        "_name_or_path",
        "_commit_hash",
        "output_attentions",
        "attn_implementation",
        "_attn_implementation_internal",
        "experts_implementation",
        "_experts_implementation_internal",
        "per_layer_config",
        "auto_map",
        "quantization_config",
    }
)
_DERIVED: Any = None  # the default of a field that takes the value its attention calls for


class GvaConfig(Shape, SavedWithCode, PreTrainedConfig):
    """The shape of a model and the attention it uses.

    Fields left at None take the value that the attention calls for; a field that the attention has no use
    for must stay None, so that a config never claims what the model does not do.

    hidden_size, intermediate_size, num_hidden_layers, vocab_size, max_position_embeddings: the usual sizes.
    num_attention_heads: H. num_value_groups: G, the key-value heads of GQA; H for mha, 1 for mqa. MLA has no
        groups; G then only sets the default of latent_dim.
    value_head_dim: d_h, by default hidden_size / H.
    attention: mha | mqa | gqa | mla | shared_kv | gva | gta, or one that was registered.
    positional: 'rope' rotates whole heads; 'decoupled' adds one shared rotated slice (gva, mla, gta).
    rope_dim: d_r, the width of that slice. rope_allocation: 'carved' takes it out of the head (d_n = d_h - d_r),
        'additive' puts it beside (d_n = d_h; gva and mla); by default carved wherever the head is wider.
    map_init: 'scale_matched' or 'standard' start of the maps M_h, or 'none': no maps, values are keys (gva only).
    query_norm: RMSNorm over each whole query head, one gain shared by the heads.
    latent_dim: d_c of mla, by default G d_h. latent_norm: False leaves out the norm of the latent.
    rope_parameters: as transformers has them, of type default, linear, yarn or llama3; rope_theta is the shortcut.
    rope_frequencies: the angle per position of each rotated pair, instead of what rope_parameters would give.
    score_scale: what scores are multiplied by, instead of 1 / sqrt(d_qk).
    qkv_bias, output_bias, mlp_bias: a bias on every projection of an attention's input, on its output, in the
        feed-forward.
    layers: what single layers have otherwise, {number: {field: value}}, of LAYER_FIELDS; another attention or
        positional begins from its own defaults. `layer(i)` is the config of layer i.
    """

    model_type = "gva"
    # Others look for it by this name: vLLM plans FlashAttention's work with it.
    attribute_map = {"num_key_value_heads": "num_value_groups"}  # noqa: RUF012
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - the base class declares the type

    vocab_size: int = 50304
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_value_groups: int = _DERIVED
    value_head_dim: int = _DERIVED
    max_position_embeddings: int = 2048
    rope_theta: float = _DERIVED
    rope_parameters: dict = _DERIVED
    tie_word_embeddings: bool = True
    attention: str = "gva"
    positional: str = _DERIVED
    rope_dim: int | None = None
    rope_allocation: str | None = None
    map_init: str | None = None
    query_norm: bool = False
    latent_dim: int | None = None
    latent_norm: bool = True
    rope_frequencies: list[float] | None = None
    score_scale: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    layers: dict | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        known = known_fields()
        for name in kwargs:
            if name not in known:
                raise TypeError(f"GvaConfig has no field {name!r}{nearest(name, known)}")
        if kwargs.get("per_layer_config"):  # of transformers: it would neither be resolved nor checked
            raise TypeError("per_layer_config: GvaConfig has `layers` for what single layers have otherwise")
        self._check_types()
        self._resolve_attention()
        self._resolve_rope(kwargs.pop("rope_scaling", None))
        self._resolve_layers()
        self.base_model_tp_plan = tensor_parallel_plan(self)
        super().__post_init__(**kwargs)
        check_choice("rope_parameters['rope_type']", self.rope_parameters["rope_type"], ROPE_TYPES)
        try:
            self.validate_rope()
        except KeyError as error:
            raise ValueError(f"rope_parameters={self.rope_parameters}: {error.args[0]}") from None

    # ---- resolution and validation ----

    def _check_types(self) -> None:
        biases = ("qkv_bias", "output_bias", "mlp_bias")
        for name in ("query_norm", "tie_word_embeddings", "use_cache", "latent_norm", *biases):
            check(isinstance(getattr(self, name), bool), name, getattr(self, name), "must be True or False")
        scale = self.score_scale
        check(scale is None or (_is_number(scale) and scale > 0), "score_scale", scale, "must be positive")
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        ):
            _check_positive(name, getattr(self, name))
        layers = self.num_hidden_layers
        check(layers <= MOST_LAYERS, "num_hidden_layers", layers, f"must be {MOST_LAYERS:,} at most")
        for name in ("num_value_groups", "value_head_dim", "rope_dim", "latent_dim"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))

    def _resolve_rope(self, rope_scaling: dict | None) -> None:
        """One RoPE base, whether it came as `rope_theta` or inside `rope_parameters`."""
        parameters = copy.deepcopy(self.rope_parameters or rope_scaling or {})
        inside = parameters.get("rope_theta")
        if inside is not None and self.rope_theta is not None:
            check(
                inside == self.rope_theta,
                "rope_theta",
                self.rope_theta,
                f"contradicts rope_parameters['rope_theta']={inside}; give one of them",
            )
        given = inside if inside is not None else self.rope_theta
        self.rope_theta = 10000.0 if given is None else float(given)
        check(self.rope_theta > 0, "rope_theta", given, "must be positive")
        self.rope_parameters = {**parameters, "rope_theta": self.rope_theta}
        if self.rope_frequencies is not None:
            self._check_frequencies()

    def _check_frequencies(self) -> None:
        given, pairs = self.rope_frequencies, self.rotated_dim // 2
        fine = isinstance(given, list | tuple) and all(_is_number(f) and f >= 0 for f in given)
        check(fine, "rope_frequencies", given, "must be a list of numbers, none of them negative")
        assert given is not None
        check(len(given) == pairs, "rope_frequencies", given, f"{len(given)} numbers for {pairs} rotated pairs")
        late = "keys that are rebuilt and rotated at every step follow rope_parameters alone"
        check(not self.rotates_late, "rope_frequencies", given, late)
        self.rope_frequencies = [float(f) for f in given]

    def _resolve_layers(self) -> None:
        """Overrides under the numbers of their layers as JSON has them, each resolved and checked as a whole config."""
        check(self.layers is None or isinstance(self.layers, Mapping), "layers", self.layers, "must be a mapping")
        given, self.layers = self.layers or {}, None
        resolved = {}
        for index, overrides in given.items():
            last = self.num_hidden_layers - 1
            number = int(index) if str(index).isdecimal() else -1
            check(0 <= number <= last, "layers", index, f"must be the number of a layer, 0 to {last}")
            check(isinstance(overrides, Mapping), f"layers[{number}]", overrides, "must be a mapping of fields")
            for name in overrides:
                check_choice(f"layers[{number}]", name, LAYER_FIELDS)
            try:
                layer = self._with_overrides(overrides)
            except (ValueError, TypeError) as error:
                raise type(error)(f"layers[{number}]: {error}") from None
            if overrides:
                resolved[number] = {name: getattr(layer, name) for name in overrides}
        self.layers = {str(number): resolved[number] for number in sorted(resolved)} or None

    def _with_overrides(self, overrides: Mapping[str, Any]) -> "GvaConfig":
        """This config with some fields replaced; another attention, or positional, begins from its own defaults."""
        own = {name: getattr(self, name) for name in own_fields() if name != "layers"}
        if {"attention", "positional"} & set(overrides):
            attention = overrides.get("attention", self.attention)
            check_choice("attention", attention, names())
            own = {name: value for name, value in own.items() if name not in VARIANT_FIELDS}
            own = _fit_groups({**own, "attention": attention}, attention)
        return GvaConfig(**_overridden(own, dict(overrides)))

    # ---- layers ----

    def layer(self, index: int) -> "GvaConfig":
        """What layer `index` is built from: this config, or one of its own where `layers` says so."""
        overrides = (self.layers or {}).get(str(index))
        return self if overrides is None else self._with_overrides(overrides)

    @property
    def layer_configs(self) -> list["GvaConfig"]:
        return [self.layer(index) for index in range(self.num_hidden_layers)]

    # ---- presets, variants, foreign configs ----

    @classmethod
    def preset(cls, name: str, variant: str = "gva", **overrides: Any) -> "GvaConfig":
        """A preset size with a variant's attention; further fields override both."""
        check_choice("preset", name, PRESETS)
        check_choice("variant", variant, VARIANTS)
        return cls(**{**_fit_groups(PRESETS[name], VARIANTS[variant]["attention"]), **VARIANTS[variant], **overrides})

    def with_variant(self, variant: str, **overrides: Any) -> "GvaConfig":
        """The same size with another variant's attention."""
        check_choice("variant", variant, VARIANTS)
        size = {name: getattr(self, name) for name in own_fields() if name not in VARIANT_FIELDS}
        size = _fit_groups(size, VARIANTS[variant]["attention"])
        return GvaConfig(**_overridden({**size, **VARIANTS[variant]}, overrides))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; unknown keys of a saved config are kept, with a warning. Another's config is refused."""
        kind = config_dict.get("model_type", cls.model_type)
        check(kind == cls.model_type, "model_type", kind, NOT_OURS)
        known = known_fields()
        unknown = {k: v for k, v in config_dict.items() if k not in known}
        if unknown:
            hints = ", ".join(f"{name!r}{nearest(name, known)}" for name in unknown)
            warnings.warn(
                f"config.json has fields that GvaConfig does not know: {hints}; kept as they are",
                stacklevel=2,
            )
        # Where a folder's classes are is a fact of that folder: the next one says it for itself. Which kernel attends
        # is for whoever loads it to say: a stranger's could be one to fetch.
        given = {k: v for k, v in config_dict.items() if k in known - {"auto_map", "attn_implementation"}}
        # Overrides go through the constructor, so that they are resolved and checked like any other value.
        ours = {f.name for f in fields(cls)} - {"dtype"}
        given = _overridden(given, {k: kwargs.pop(k) for k in list(kwargs) if k in ours})
        if not kwargs.get("return_unused_kwargs"):
            refuse_misspelt(kwargs)
        loaded = super().from_dict(given, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        for name, value in unknown.items():
            if not name.startswith("_"):  # transformers' own: a kernel to fetch, say
                setattr(config, name, value)
        return loaded


def known_fields() -> set[str]:
    """Every name that GvaConfig takes, ours and those of transformers."""
    return {f.name for f in fields(GvaConfig)} | _TRANSFORMERS_EXTRAS


def own_fields() -> list[str]:
    """The names of our own fields."""
    theirs = {f.name for f in fields(PreTrainedConfig)}
    return [f.name for f in fields(GvaConfig) if f.name not in theirs]


def refuse_misspelt(arguments: Iterable[str]) -> None:
    """Raise TypeError for a keyword that is close to one of our fields but is none. Others are transformers' own."""
    for name in arguments:
        if name not in known_fields() and (hint := nearest(name, own_fields(), cutoff=0.8)):
            raise TypeError(f"GvaConfig has no field {name!r}{hint}")


def check_ranks(config: GvaConfig, ranks: int) -> None:
    """Refuse tensor parallelism that would cut a head or a group in two."""
    H = config.num_attention_heads
    check(H % ranks == 0, "num_attention_heads", H, f"cannot be split over {ranks} tensor-parallel ranks")
    for layer in config.layer_configs:
        G, whole = layer.num_value_groups, all(part.shared or part.heads % ranks == 0 for part in layer.row.parts)
        check(whole, "num_value_groups", G, f"cannot be split over {ranks} tensor-parallel ranks; use at most {G}")


def tensor_parallel_plan(config: GvaConfig) -> dict[str, str]:
    """How transformers shards each projection: heads and groups split, what all heads share replicated. One plan serves
    all layers: a name is sharded alike wherever it appears."""
    shared = "replicated_with_grad_allreduce"
    styles: dict[str, str] = {}
    for layer in config.layer_configs:
        chosen = class_of(layer)
        styles |= {name: shared if part.shared else "colwise" for name, part in chosen.projections(layer).items()}
        styles |= dict.fromkeys(chosen.maps(layer), "colwise") | dict.fromkeys((*chosen.norms(layer), "q_norm"), shared)
    plan = {f"self_attn.{name}": style for name, style in styles.items()}
    plan |= {"self_attn.q_proj": "colwise", "self_attn.o_proj": "rowwise"}
    plan |= {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
    return {f"layers.*.{name}": style for name, style in plan.items()}


def _overridden(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Fields with some replaced; a new RoPE base replaces the old one in both places that may hold it."""
    base = dict(base)
    if overrides.get("rope_parameters") is not None:
        base.pop("rope_theta", None)
    elif overrides.get("rope_theta") is not None and base.get("rope_parameters"):
        base["rope_parameters"] = {k: v for k, v in base["rope_parameters"].items() if k != "rope_theta"}
    return {**base, **overrides}


def _fit_groups(size: dict[str, Any], attention: str) -> dict[str, Any]:
    """mha and mqa have as many groups as their name says, whatever the size asks for."""
    (chosen, *_) = choices(attention)
    fixed = chosen.fixed_groups(size["num_attention_heads"])
    return size if fixed is None else {**size, "num_value_groups": fixed}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_positive(name: str, value: Any) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value > 0
    check(ok, name, value, "must be a positive integer")
