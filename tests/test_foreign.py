"""`gva cost` on checkpoints of other families: what their publishers say that they have, what transformers caches of
them, and a refusal by name where neither would come out."""

import json

import pytest

from gva import GvaConfig, cost
from gva.cli import foreign, main

# config.json as published, as far as it says how large a model is and what it keeps.
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 40960,
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36, "tie_word_embeddings": False,
}  # fmt: skip
QWEN25 = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 131072,
    "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28, "tie_word_embeddings": False,
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
    "sliding_window": 4096, "tie_word_embeddings": False,
}  # fmt: skip
PHI3 = {
    "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "max_position_embeddings": 4096,
    "sliding_window": 2047, "tie_word_embeddings": False, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
}  # fmt: skip
PHI3_LONG = PHI3 | {
    "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144,
    "rope_scaling": {"type": "longrope", "long_factor": [1.07] * 48, "short_factor": [1.1] * 48},
}  # fmt: skip
GEMMA2 = {  # says nothing of its embeddings, which are tied
    "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "head_dim": 256,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 256000, "max_position_embeddings": 8192,
    "sliding_window": 4096,
}  # fmt: skip
GEMMA3 = {  # 12B: neither vocabulary, nor width of a head, nor context
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27},
}  # fmt: skip

# parameters as published (Gemma 3: the language model's, 1,012M and 10,759M), scalars a token and layer, and how many
# layers keep how many tokens
PUBLISHED = {
    "Llama-3.1-8B": (LLAMA, 8_030_261_248, 2048, {}),
    "Qwen3-8B": (QWEN3, 8_190_735_360, 2048, {}),
    "Qwen2.5-7B": (QWEN25, 7_615_616_512, 1024, {}),
    "Mistral-7B-v0.1": (MISTRAL, 7_241_732_096, 2048, {4096: 32}),
    "Mistral-7B-v0.3": (MISTRAL | {"vocab_size": 32768, "sliding_window": None}, 7_248_023_552, 2048, {}),
    "Phi-3-mini-4k": (PHI3, 3_821_079_552, 6144, {2047: 32}),
    "Phi-3-mini-128k": (PHI3_LONG, 3_821_079_552, 6144, {262144: 32}),
    "Gemma-2-9B": (GEMMA2, 9_241_705_984, 4096, {4096: 21}),
    "Gemma-3-12B": (GEMMA3, 11_771e6, 4096, {1024: 40}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_published_is_what_is_counted(name):
    source, parameters, scalars, kept = PUBLISHED[name]
    config, windows = foreign.read(source, {})
    assert cost.parameters(config)["total"] == pytest.approx(parameters, rel=1e-3)
    assert cost.cache_scalars_per_token_per_layer(config) == scalars
    assert {w: windows.count(w) for w in set(windows) - {None}} == kept


def test_the_preset_of_this_size_is_that_checkpoint():
    preset = GvaConfig.preset("llama-8b", variant="gqa")
    assert cost.parameters(preset)["total"] == 8_030_261_248
    assert preset.rope_theta == LLAMA["rope_theta"]
    read, _ = foreign.read(LLAMA, {})
    assert {**preset.to_dict(), **dict.fromkeys(("rope_theta", "rope_parameters"))} == {
        **read.to_dict(), **dict.fromkeys(("rope_theta", "rope_parameters"))
    }  # fmt: skip


def test_a_window_bounds_what_its_layers_cache_and_read(tmp_path, capsys):
    config, windows = foreign.read(GEMMA2, {})
    row, half = 2 * 4096, 21 * 2 * 4096
    assert cost.cache_bytes(config, 8192, windows=windows) == half * (8192 + 4096)
    assert cost.cache_bytes(config, 4096, windows=windows) == cost.cache_bytes(config, 4096)
    whole, bounded = (cost.decode_step(config, 4, 8192, windows=w) for w in (None, windows))
    assert whole.cache_bytes - bounded.cache_bytes == 4 * half * 4096
    assert bounded.cache_bytes == 4 * (half * (8192 + 4096) + 42 * row)
    assert whole.flops - bounded.flops == 4 * 21 * 4096 * 2 * 16 * 2 * 256  # scores and sums of 16 heads of 256
    memory = 2 * cost.parameters(config)["total"] + 3 * half * (8192 + 4096)
    assert cost.largest_batch(config, 8192, memory, windows=windows) == 3
    assert cost.largest_batch(config, 8192, memory) == 2
    (tmp_path / "config.json").write_text(json.dumps(GEMMA2))
    assert main(["cost", str(tmp_path), "--variants", "gqa,gva-drope-16", "--context", "9000", "--json"]) == 0
    told = capsys.readouterr()
    assert "note: --context 9,000 is beyond the 8,192 tokens of the model's" in told.err
    assert "note: 21 of 42 layers keep the last 4,096 tokens alone" in told.err
    gqa, gva = json.loads(told.out)
    assert gqa["cache_bytes"] == half * (9000 + 4096)
    assert gva["cache_bytes"] / gqa["cache_bytes"] == (8 * 256 + 16) / 4096


def test_fewer_heads_against_the_checkpoint_as_it_is(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL))
    words = ["cost", str(tmp_path), "--variants", "gqa,mqa,gva-drope-16", "--context", "8192", "--json"]
    assert main([*words, "--set", "num_key_value_heads=2", "--set", "sliding_window=1024"]) == 0
    rows = {row["variant"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["unchanged", "gqa", "mqa", "gva-drope-16"]
    assert [row["num_value_groups"] for row in rows.values()] == [8, 2, 1, 2]
    assert [row["cache_saved_against_gqa"] for row in rows.values()] == [0, 0.75, 0.875, 1 - (2 * 128 + 16) / 2048]
    assert rows["unchanged"]["cache_bytes"] == 4 * 4 * rows["gqa"]["cache_bytes"], "each with its own window"
    assert rows["unchanged"]["parameters"] == 7_241_732_096 > rows["gqa"]["parameters"]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ({"model_type": "bert"}, "model_type='bert': an encoder"),
        ({"model_type": "t5"}, "model_type='t5': an encoder, or has one"),
        ({"model_type": "mamba"}, "model_type='mamba': has state-space layers"),
        ({"model_type": "falcon_h1"}, "model_type='falcon_h1': has state-space layers"),
        ({"model_type": "deepseek_v3"}, "has a mixture of experts and multi-head latent attention"),
        ({"model_type": "qwen3_next"}, "has a mixture of experts and linear attention"),
        ({"model_type": "gemma4"}, "model_type='gemma4_text': head_dim is not the same in every layer"),
        ({"model_type": "gpt2"}, "model_type='gpt2': has no intermediate_size"),
        ({"model_type": "recurrent_gemma"}, "layer 0 caches no keys and values of a token, not [1, 10, 1, 256]"),
        ({"model_type": "starcoder2"}, "transformers' model has 3,030.4M parameters; attention, gated feed-forward"),
        ({"model_type": "novel"}, "model_type='novel': transformers 5"),
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be 4,096 at most"),
        (LLAMA | {"model_type": "qwen2", "num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be 4,096"),
        ({"hidden_size": 64}, "model_type=None: transformers 5"),
        (LLAMA | {"num_attention_heads": "32"}, "model_type='llama': Validation error for field 'num_attention_heads'"),
    ],
    ids=lambda value: value.get("model_type", "none") if isinstance(value, dict) else "",
)
def test_what_cannot_be_counted_is_refused_by_name(source, why, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(source))
    assert main(["cost", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert why in told.err
    assert not told.out
    assert told.err.count("\n") == 1


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ("num_key_value_heds=2", "no such field; did you mean 'num_key_value_heads'?"),
        ("num_key_value_heads=3", "num_value_groups=3: must divide num_attention_heads=32"),
        ("rope_dim=8", "is what a variant sets"),
    ],
)
def test_a_field_that_cannot_be_changed_is_named(field, why, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert main(["cost", str(tmp_path), "--set", field]) == 2
    assert why in capsys.readouterr().err
