"""Toy models that tests share: small enough for a blink, wide enough for every variant."""

import torch

from gva import VARIANTS, GvaConfig, GvaForCausalLM

SIZE = {
    "vocab_size": 98,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_value_groups": 2,
    "value_head_dim": 32,
    "max_position_embeddings": 128,
}
DECOUPLED = ["mla", "gva-drope-24", "gva-drope-16", "gva-drope-32", "gva-one-group", "gta"]


def tiny_config(variant: str, **overrides) -> GvaConfig:
    return GvaConfig.preset("demo", variant=variant, **{**_size(variant), **overrides})


def tiny_model(variant: str, dtype: torch.dtype = torch.float64, seed: int = 0, std: float = 0.2, **overrides):
    """Weights are drawn wider than in training, so that greedy tokens vary and mistakes show."""
    torch.manual_seed(seed)
    return GvaForCausalLM(tiny_config(variant, initializer_range=std, **overrides)).to(dtype).eval()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, SIZE["vocab_size"], shape)


def _size(variant: str) -> dict:
    """The sizes, with as many groups as the variant says, where it does."""
    groups = {"mha": SIZE["num_attention_heads"], "mqa": 1}.get(variant, SIZE["num_value_groups"])
    return {**SIZE, "num_value_groups": VARIANTS[variant].get("num_value_groups", groups)}


@torch.no_grad()
def made_to_end(model, prompt: list[int], end: int, at_least: int = 3) -> list[int]:
    """Let a greedy answer to the prompt end after so many tokens or more: the first token that is new then changes
    places with `end`. Returns the answer."""
    ids = torch.tensor([prompt])
    said = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=-1, pad_token_id=0)[0].tolist()
    last = next(i for i in range(len(prompt) + at_least, len(said)) if said[i] not in said[:i])
    assert end not in said[:last], "choose another prompt"
    table = model.get_input_embeddings().weight
    table[[said[last], end]] = table[[end, said[last]]]
    return [*said[len(prompt) : last], end]
