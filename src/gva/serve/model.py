"""The decoder of `gva.model`, built of vLLM's layers. vLLM finds it through `gva.serve.plugin`."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gva.serve import checks, versions

versions.check()  # before vLLM's names are imported: a version that lacks one of them says so here, in words

from vllm.compilation.decorators import support_torch_compile  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402
from vllm.model_executor.layers.layernorm import RMSNorm  # noqa: E402
from vllm.model_executor.layers.logits_processor import LogitsProcessor  # noqa: E402
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding  # noqa: E402
from vllm.model_executor.model_loader.weight_utils import default_weight_loader  # noqa: E402
from vllm.model_executor.models.llama import LlamaMLP  # noqa: E402
from vllm.sequence import IntermediateTensors  # noqa: E402

from gva.attention.rope import Rotation, Turns  # noqa: E402
from gva.serve.attention import JointProjection, build  # noqa: E402


class DecoderLayer(nn.Module):
    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        """`config` is that of the layer."""
        super().__init__()
        self.self_attn = build(config, vllm_config, f"{prefix}.self_attn")
        sizes, quant_config = (config.hidden_size, config.intermediate_size), vllm_config.quant_config
        self.mlp = LlamaMLP(*sizes, "silu", quant_config, bias=config.mlp_bias, prefix=f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What this layer adds, and the sum before it: vLLM's norms add the one to the other."""
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states, rotation)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


@support_torch_compile
class GvaModel(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(layer, vllm_config, f"{prefix}.layers.{i}") for i, layer in enumerate(config.layer_configs)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        # Angles in float32, as in training: a table in bfloat16 would blur them. In buffers, to lie on the device.
        turns = Turns(config.layer_configs, None, torch.float32)
        self.turn_of_layer, self.rope_factors = turns.of_layer, [factor for _, factor in turns.sets]
        for number, (inverse, _) in enumerate(turns.sets):
            self.register_buffer(f"inverse_frequencies_{number}", inverse, persistent=False)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        rotations, at = [], positions[:, None, None].float()
        for number, factor in enumerate(self.rope_factors):
            angles = at * getattr(self, f"inverse_frequencies_{number}")
            rotations.append((angles.cos() * factor, angles.sin() * factor))
        residual = None
        for layer, turn in zip(self.layers, self.turn_of_layer, strict=True):
            hidden_states, residual = layer(hidden_states, residual, rotations[turn])
        return self.norm(hidden_states, residual)[0]


class GvaForCausalLM(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        checks.check_servable(config)
        self.config = config
        self.model = GvaModel(vllm_config=vllm_config, prefix=f"{prefix}.model" if prefix else "model")
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The project's checkpoints, whose names are ours; returns the parameters that were filled. vLLM refuses a
        checkpoint that leaves one out."""
        parameters, joint = dict(self.named_parameters()), self.joint_projections()
        loaded = set()
        for name, weight in weights:
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            owner, _, kind = name.rpartition(".")
            home, part = joint.get(owner, (None, None))
            target = name if home is None else f"{home}.{kind}"
            if target not in parameters:
                raise ValueError(f"the checkpoint has {name!r}, which attention={self.config.attention!r} does not use")
            parameter = parameters[target]
            load = getattr(parameter, "weight_loader", default_weight_loader)
            load(parameter, weight) if part is None else load(parameter, weight, part)
            loaded.add(target)
        return loaded

    def joint_projections(self) -> dict[str, tuple[str, int]]:
        """Name of a projection in the checkpoint -> the product it is a part of, and which part."""
        parts: dict[str, tuple[str, int]] = {}
        for name, module in self.named_modules():
            if isinstance(module, JointProjection):
                names = module.names
            elif isinstance(module, LlamaMLP):
                name, names = f"{name}.gate_up_proj", ["gate_proj", "up_proj"]
            else:
                continue
            owner = name.rpartition(".")[0]
            parts |= {f"{owner}.{part}": (name, i) for i, part in enumerate(names)}
        return parts
