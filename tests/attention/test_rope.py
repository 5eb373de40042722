"""Frequencies against transformers' own, and the one property that matters: only differences of positions count."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gva.attention.rope import Turns, frequencies, rotate, tables
from models import tiny_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 3.0},
        YARN,
        {**YARN, "attention_factor": 1.5},
        {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
        LLAMA3,
        {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 8.0, "original_max_position_embeddings": 400},
    ],
    ids=["linear", "yarn", "yarn-factor", "yarn-betas", "yarn-mscale", "llama3", "llama3-ramp"],
)
@pytest.mark.parametrize("variant", ["gqa", "gva-drope-24"])
def test_frequencies_equal_those_of_transformers(variant, parameters):
    config = tiny_config(variant, rope_parameters=parameters, rope_theta=500.0)
    llama = LlamaConfig(
        head_dim=config.rotated_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={**parameters, "rope_theta": 500.0},
    )
    want, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](llama)
    got, got_factor = frequencies(config)
    torch.testing.assert_close(got, want)
    assert got_factor == pytest.approx(factor)


def test_frequencies_that_a_config_names_are_taken_as_they_are():
    given = [3.0, 3.0, 0.5, 0.25, 0.1, 0.0, 1e-3, 1e-4]
    inverse, factor = frequencies(tiny_config("gva-drope-16", rope_frequencies=given, rope_parameters=YARN))
    assert factor == 1.0
    torch.testing.assert_close(inverse, torch.tensor(given))


def test_layers_that_turn_alike_share_a_table():
    plain, other = tiny_config("gva-drope-16"), tiny_config("gva-drope-16", rope_frequencies=[0.1] * 8)
    configs = [plain, other, tiny_config("mla"), tiny_config("gva-drope-16", rope_frequencies=[0.1] * 8), plain]
    turns = Turns(configs, None, torch.float32)
    made = turns.tables(torch.arange(5)[None])
    assert turns.of_layer == [0, 1, 0, 1, 0]
    assert [made[i][0] is made[0][0] for i in range(5)] == [True, False, True, False, True]
    for config, rotation in zip(configs, made, strict=True):
        for got, want in zip(rotation, tables(config, torch.arange(5)[None], torch.float32), strict=True):
            assert torch.equal(got, want)


def test_default_frequencies_are_powers_of_the_base():
    inverse, factor = frequencies(tiny_config("gva-drope-16", rope_theta=100.0), dtype=torch.float64)
    assert factor == 1.0
    assert inverse.tolist() == pytest.approx([100.0 ** (-2 * i / 16) for i in range(8)])


@pytest.mark.parametrize("shift", [1, 50])
def test_scores_depend_on_differences_of_positions(shift):
    config = tiny_config("gva-drope-16")
    q, k = torch.randn(2, 9, 1, 16, dtype=torch.float64)  # one head
    positions = torch.arange(9)[None]

    def scores(positions):
        embeddings = tables(config, positions, torch.float64)
        return rotate(q, embeddings)[..., 0, :] @ rotate(k, embeddings)[..., 0, :].mT

    torch.testing.assert_close(scores(positions), scores(positions + shift), rtol=0, atol=1e-12)


def test_the_yarn_attention_factor_scales_both_sides_of_a_score():
    plain = tiny_config("gva-drope-16", rope_parameters={**YARN, "attention_factor": 1.0})
    scaled = tiny_config("gva-drope-16", rope_parameters={**YARN, "attention_factor": 2.0})
    x = torch.randn(1, 5, 1, 16, dtype=torch.float64)
    positions = torch.arange(5)[None]
    a, b = (rotate(x, tables(c, positions, torch.float64)) for c in (plain, scaled))
    torch.testing.assert_close(2 * a, b)


def test_low_precision_models_keep_exact_angles():
    """Rounding a rotated bfloat16 number once costs eps / 2; rounding its angle first would cost far more."""
    config, positions = tiny_config("gqa"), torch.arange(100, 120)[None]
    x = torch.randn(1, 20, 1, 32).to(torch.bfloat16)
    got = rotate(x, tables(config, positions, torch.bfloat16)).double()
    exact = rotate(x.double(), tables(config, positions, torch.float64))
    assert (got - exact).abs().max() <= 0.51 * torch.finfo(torch.bfloat16).eps * exact.abs().max() * 1.01
