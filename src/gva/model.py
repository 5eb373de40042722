"""The HuggingFace model: a pre-norm decoder with SwiGLU, whose attention is a choice in the config."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers import initialization as hf_init
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from gva.attention import Attention, RMSNorm, build
from gva.attention.base import Attend
from gva.attention.init import draw, weight_std
from gva.attention.rope import Rotation, Turns
from gva.caches import SideBySide
from gva.config import GvaConfig, check_ranks, refuse_misspelt
from gva.remote import Registered
from gva.weights import AS_DATA, misfits, replacing, shapes_of, verified, verify_folder


class FeedForward(nn.Module):
    def __init__(self, config: GvaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: GvaConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = build(config.layer(layer_idx), layer_idx)
        self.mlp = FeedForward(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), rotation, attend)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class GvaPreTrainedModel(Registered, PreTrainedModel):
    config: GvaConfig
    config_class = GvaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012 - as transformers declares it
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True
    # Absorbed scores are d_h + d_r wide, values d_h: flash kernels want one width.
    _supports_flash_attn = False
    _supports_flex_attn = False
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": DecoderLayer, "attentions": Attention}  # noqa: RUF012

    def __init__(self, config: GvaConfig) -> None:
        super().__init__(config)
        # Taken before any module is built: torch draws weights of its own there, as many as the variant has.
        self._init_seed = int(torch.randint(2**62, (), device="cpu"))
        self._init_names: dict[int, str] = {}
        self._init_configs: dict[int, GvaConfig] = {}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw each matrix by its name, so that variants under one seed start alike wherever they can."""
        if isinstance(module, nn.RMSNorm):
            hf_init.ones_(module.weight)
        elif isinstance(module, nn.Linear | nn.Embedding):
            if module.weight.device.type == "meta":
                return
            if id(module) not in self._init_names:  # at first, and in a copy of a model
                self._init_names = {id(m): name for name, m in self.named_modules()}
                attentions = [m for m in self.modules() if isinstance(m, Attention)]
                self._init_configs = {id(m): attention.config for attention in attentions for m in attention.modules()}
            # A module that is not in the model yet (resized embeddings) has no name; its class stands in.
            name = self._init_names.get(id(module), type(module).__name__)
            std = weight_std(self._init_configs.get(id(module), self.config), name.rsplit(".", 1)[-1])
            hf_init.copy_(module.weight, draw(self._init_seed, name, module.weight, std))
            if getattr(module, "bias", None) is not None:
                hf_init.zeros_(module.bias)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; a local folder is checked for shards that are missing, truncated or not what was
        written, and a tensor-parallel plan for groups that cannot be split."""
        refuse_misspelt(kwargs)
        if kwargs.get("tp_plan") is not None:
            config = kwargs.get("config") or cls.config_class.from_pretrained(pretrained_model_name_or_path)
            check_ranks(config, int(os.environ.get("WORLD_SIZE", "1")))
        local = pretrained_model_name_or_path is not None and os.path.isdir(pretrained_model_name_or_path)
        folder = os.path.join(pretrained_model_name_or_path or "", kwargs.get("subfolder") or "")
        with verified(Path(folder)) if local else nullcontext():
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers, but the files appear only once all of them are written."""
        main = args[0] if args else kwargs.get("is_main_process", True)
        if not main:
            super().save_pretrained(save_directory, *args, **kwargs)
            return
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", os.path.basename(os.path.normpath(save_directory)))
        with replacing(save_directory) as staging:
            super().save_pretrained(staging, *args, **kwargs)


class GvaModel(GvaPreTrainedModel):
    def __init__(self, config: GvaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        attention_form: str | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """`attention_form`: 'expanded' or 'absorbed' for attentions that have both; None takes the cheaper.

        Without attention mask and past_key_values, position_ids that start again mark packed documents, which
        then do not see one another. Where the cache is V alone (ordinary-RoPE GVA, shared KV), a cached forward
        counts positions by cache slot and not by position_ids: the same up to a shift per row, unless
        position_ids leave gaps.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if self.gradient_checkpointing and self.training:  # a layer that runs twice would cache its tokens twice
            use_cache, past_key_values = False, None
        held = past_key_values
        if use_cache and held is None:
            past_key_values = DynamicCache(config=self.config)
        capacity = self._check_cache(held, inputs_embeds.shape[1])
        past = 0 if held is None else held.get_seq_length()
        packed = held is None and position_ids is not None
        if not packed:  # documents packed side by side may together be longer than any of them could be
            self._check_length(inputs_embeds.shape[1], past)
        # A sum makes a copy: a static cache counts its length in a tensor that `update` then changes.
        slots = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=held,  # not a cache made here: with one, packed documents would go unnoticed
            position_ids=position_ids,  # only the caller's: looking for documents in them waits for the device
        )
        position_ids = slots if position_ids is None else position_ids
        attend = SideBySide(mask, past_key_values, attention_form, None, kwargs, self.config._attn_implementation)
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        turns = Turns([attention.config for attention in attentions], inputs_embeds.device, inputs_embeds.dtype)
        rotations, attends = turns.tables(position_ids), [attend] * len(attentions)
        late = [attention.rotates_late for attention in attentions]
        if any(late):
            of_queries = of_keys = rotations
            if past_key_values is not None:
                # Keys rebuilt from cached values are rotated by cache slot, so their queries must be too.
                held_slots = capacity if capacity > 0 else past + inputs_embeds.shape[1]
                every_slot = torch.arange(held_slots, device=inputs_embeds.device)[None]
                of_queries, of_keys = turns.tables(slots), turns.tables(every_slot)
            attends = [replace(attend, key_rotation=of_keys[i]) if late[i] else attend for i in range(len(late))]
            rotations = [of_queries[i] if late[i] else rotations[i] for i in range(len(late))]
        hidden_states = self.run_layers(inputs_embeds, rotations, attends)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)

    def run_layers(self, hidden_states: Tensor, rotations: list[Rotation], attends: Sequence[Attend]) -> Tensor:
        """All layers and the last norm: what may be compiled as one, the mask having been decided outside."""
        for layer, rotation, attend in zip(self.layers, rotations, attends, strict=True):
            hidden_states = layer(hidden_states, rotation, attend)
        return self.norm(hidden_states)

    def _check_length(self, queries: int, past: Any) -> None:
        """Refuse what the context cannot hold, judged from shapes alone so that no device is waited for. How full
        a static cache is, only the device knows: its capacity is judged instead, in `_check_cache`."""
        limit = self.config.max_position_embeddings
        if isinstance(past, int) and past + queries > limit:
            raise ValueError(
                f"input_ids: {queries} tokens after {past} cached ones exceed max_position_embeddings={limit}"
            )

    def _check_cache(self, cache: Any, queries: int) -> int:
        """Refuse a cache of another kind or depth; returns how many tokens it can hold, -1 for any number."""
        if cache is None:
            return -1
        if not isinstance(cache, Cache):
            raise TypeError(
                f"past_key_values={type(cache).__name__}: must be a transformers Cache, such as DynamicCache()"
            )
        layers, depth = getattr(cache, "layers", []), self.config.num_hidden_layers
        if not layers:
            return -1
        if len(layers) != depth:
            raise ValueError(
                f"past_key_values: has {len(layers)} layers, this model {depth}; it belongs to another model"
            )
        capacity, limit = cache.get_max_length(), self.config.max_position_embeddings
        if 0 < capacity < queries:
            raise ValueError(f"past_key_values: a static cache of {capacity} tokens cannot take {queries}")
        if capacity > limit:
            raise ValueError(
                f"past_key_values: a static cache of {capacity} tokens exceeds max_position_embeddings={limit}"
            )
        return capacity


class GvaForCausalLM(GvaPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: GvaConfig) -> None:
        super().__init__(config)
        self.model = GvaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        attention_form: str | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            attention_form=attention_form,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _prepare_generated_length(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse a length past the context before the first token, not after the last that fits."""
        prepared = super()._prepare_generated_length(generation_config, *args, **kwargs)
        limit = self.config.max_position_embeddings
        if prepared.max_length is not None and prepared.max_length > limit:
            raise ValueError(
                f"max_length={prepared.max_length} (prompt and new tokens) exceeds max_position_embeddings={limit}"
            )
        return prepared

    def _get_static_cache_init_shape(self) -> None:
        """A static cache takes its shapes from the first update: keys and values differ in width here."""
        return


AutoConfig.register(GvaConfig.model_type, GvaConfig, exist_ok=True)
AutoModel.register(GvaConfig, GvaModel, exist_ok=True)
AutoModelForCausalLM.register(GvaConfig, GvaForCausalLM, exist_ok=True)


_HEAD = "lm_head.weight"


def shapes_for(config: GvaConfig) -> dict[str, tuple[int, ...]]:
    """Of the tensors that a folder of such a model holds, by their names."""
    with torch.device("meta"):
        made = GvaForCausalLM(config).state_dict()
    tied = config.tie_word_embeddings
    return {name: tuple(tensor.shape) for name, tensor in made.items() if not (tied and name == _HEAD)}


def load_whole(folder: Path, config: GvaConfig | None = None, **how: Any) -> GvaForCausalLM:
    """As `from_pretrained`, of a folder that may be a stranger's: refused where its tensors are not those that its
    config calls for, of which transformers would draw some anew."""
    verify_folder(folder)
    config = config or GvaConfig.from_pretrained(folder)
    held = shapes_of(folder)
    if config.tie_word_embeddings:
        held.pop(_HEAD, None)
    if wrong := misfits(shapes_for(config), held):
        raise OSError(f"{folder}: its weights are not those of its config: {wrong}; copy the checkpoint again")
    return GvaForCausalLM.from_pretrained(folder, config=config, **{**AS_DATA, **how})
