"""The HuggingFace model: caches of the paper's size, saving and loading, packing, checkpointing, bad input."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from gva import VARIANTS, GvaForCausalLM, cost
from gva.diagnostics import cache_scalars_per_token_per_layer
from models import tiny_config, tiny_model, tokens

pytestmark = pytest.mark.hf
SCALARS = {
    "mha": 256, "mqa": 64, "gqa": 128, "mla": 80, "gva-drope-24": 88, "gva-drope-16": 80, "gva-drope-32": 96,
    "gva-one-group": 80, "gva": 80, "gta": 80,
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_stock_caches_hold_what_the_paper_counts(variant):
    model = tiny_model(variant, torch.float32)
    caches = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=21)
    for cache in caches:
        with torch.no_grad():
            model(tokens(2, 9), past_key_values=cache)
            model(tokens(2, 1), past_key_values=cache)
        assert int(cache.get_seq_length()) == 10
        assert cache_scalars_per_token_per_layer(cache) == SCALARS.get(variant, 64)
        assert cache_scalars_per_token_per_layer(cache) == cost.cache_scalars_per_token_per_layer(model.config)
        held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
        slots = 2 * (10 if isinstance(cache, DynamicCache) else 21)
        assert held == slots * cost.cache_bytes_per_token(model.config, "float32")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_static_cache_gives_the_same_logits(variant):
    model, ids = tiny_model(variant), tokens(2, 12)
    cache = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        parts = [
            model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 7), (7, 9), (9, 10), (10, 11), (11, 12))
        ]
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-10


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_backends_agree_and_padding_changes_nothing(variant, implementation):
    """Left padding shifts every position of a row; the row's logits must not notice."""
    model = tiny_model(variant)
    model.set_attn_implementation(implementation)
    ids = tokens(1, 8)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mask = torch.tensor([[0] * 3 + [1] * 8])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    reference = tiny_model(variant)(ids, use_cache=False).logits
    for cache in (None, DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)):
        out = model(
            padded, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=cache is not None
        ).logits
        assert (out[:, 3:] - reference).abs().max() < 1e-10


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shard", ["1GB", "60KB"], ids=["whole", "sharded"])
def test_save_and_load(tmp_path, variant, shard):
    model = tiny_model(variant, torch.float32)
    model.save_pretrained(tmp_path / "m", max_shard_size=shard)
    assert (len(list((tmp_path / "m").glob("*.safetensors"))) > 1) == (shard == "60KB")
    assert [p.name for p in tmp_path.iterdir()] == ["m"], "staging folders are gone"
    loaded, info = GvaForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    ids = tokens(1, 5)
    assert torch.equal(model(ids).logits, loaded.eval()(ids).logits)


def test_saving_over_an_older_checkpoint_leaves_no_stale_shard(tmp_path):
    model = tiny_model("gva-drope-16", torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    (tmp_path / "notes.txt").write_text("mine")
    other = tiny_model("gva-drope-16", torch.float32, seed=1)
    other.save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    loaded = GvaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, other.lm_head.weight)


def test_saving_touches_only_what_it_replaces(tmp_path):
    """A rank that is not the main one writes nothing; another weight variant and a user's own files stay."""
    model = tiny_model("gva-drope-16", torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    model.save_pretrained(tmp_path, is_main_process=False, save_function=lambda *a, **k: None)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    (tmp_path / "model_ema.safetensors").write_text("mine")
    model.save_pretrained(tmp_path, variant="other")
    assert before.keys() <= {p.name for p in tmp_path.iterdir()}
    assert (tmp_path / "model_ema.safetensors").read_text() == "mine"


def test_a_save_torn_by_a_kill_does_not_load(tmp_path, monkeypatch):
    """Killed at any of its moves, an overwriting save leaves the old weights, the new ones, or a clear error."""
    old, new = (tiny_model("gva-drope-16", torch.float32, seed=s) for s in (0, 1))
    real, moves = os.replace, [0]

    def killed(source, target):
        moves[0] -= 1
        if moves[0] < 0:
            raise KeyboardInterrupt
        real(source, target)

    for survived in range(6):
        folder = tmp_path / str(survived)
        old.save_pretrained(folder, max_shard_size="60KB")
        moves[0] = survived
        monkeypatch.setattr("gva.weights.os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            new.save_pretrained(folder, max_shard_size="60KB")
        monkeypatch.setattr("gva.weights.os.replace", real)
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            GvaForCausalLM.from_pretrained(folder)


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    model = tiny_model("gva-drope-16", torch.float32)
    model.save_pretrained(tmp_path / "m")
    before = (tmp_path / "m" / "model.safetensors").read_bytes()
    broken = tiny_model("gva-drope-16", torch.float32, seed=1)

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(broken.config), "save_pretrained", full_disk)
    with pytest.raises(OSError, match="No space left"):
        broken.save_pretrained(tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file"):
        broken.save_pretrained(tmp_path / "file")


@pytest.mark.parametrize("touched", ["gva.GvaConfig", "gva.GvaForCausalLM"])
def test_touching_a_class_registers_both_auto_classes(tmp_path, touched):
    tiny_model("gva-drope-16", torch.float32).save_pretrained(tmp_path)
    code = (
        f"import gva; {touched}; from transformers import AutoConfig, AutoModelForCausalLM as A;"
        f"print(type(AutoConfig.from_pretrained({str(tmp_path)!r})).__name__,"
        f"type(A.from_pretrained({str(tmp_path)!r})).__name__)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["GvaConfig", "GvaForCausalLM"]


def test_auto_classes_and_dtype(tmp_path):
    tiny_model("mla", torch.float32).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).attention == "mla"
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model(tokens(1, 4)).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_do_not_see_one_another(variant, use_cache):
    model = tiny_model(variant)
    first, second = tokens(1, 7), tokens(1, 5)
    packed = torch.cat([first, second], 1)
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    together = model(packed, position_ids=positions, use_cache=use_cache).logits
    apart = torch.cat([model(first).logits, model(second).logits], 1)
    assert (together - apart).abs().max() < 1e-10
    joined = model(packed, use_cache=use_cache).logits
    assert (joined[:, 7:] - apart[:, 7:]).abs().max() > 1e-3, "without the mark they do"


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_train_with_gradient_checkpointing(variant):
    model, ids = tiny_model(variant), tokens(1, 12)
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    grads = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.train()
        model.zero_grad()
        model(ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert model.is_gradient_checkpointing
    for name, grad in grads[0].items():
        assert grad.abs().max() > 0, name
        assert (grad - grads[1][name]).abs().max() < 1e-10, name


def test_checkpointed_training_caches_nothing():
    """A layer runs a second time for its gradient, and must not find its own tokens in a cache."""
    model, ids, grads = tiny_model("gva-drope-16"), tokens(1, 12), []
    model.train()
    model.gradient_checkpointing_enable()
    for options in ({"use_cache": False}, {}, {"past_key_values": DynamicCache()}):
        model.zero_grad()
        out = model(ids, labels=ids, **options)
        assert out.past_key_values is None
        out.loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert all((other - grads[0]).abs().max() < 1e-10 for other in grads[1:])


def test_packed_documents_may_fill_more_than_one_context():
    """200 tokens of 100-token documents: no position exceeds the context of 128."""
    model, ids = tiny_model("gva-drope-16"), tokens(1, 200)
    positions = torch.arange(100).repeat(2)[None]
    together = model(ids, position_ids=positions, use_cache=False).logits
    apart = torch.cat([model(ids[:, :100]).logits, model(ids[:, 100:]).logits], 1)
    assert (together - apart).abs().max() < 1e-10


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_bare_dynamic_cache_serves(variant):
    model, ids = tiny_model(variant), tokens(1, 6)
    cache = DynamicCache()
    parts = [model(ids[:, :4], past_key_values=cache).logits, model(ids[:, 4:], past_key_values=cache).logits]
    assert (torch.cat(parts, 1) - model(ids, use_cache=False).logits).abs().max() < 1e-10
    assert model.generate(ids, past_key_values=DynamicCache(), max_new_tokens=3, pad_token_id=0).shape == (1, 9)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_trains(variant):
    model, ids = tiny_model(variant, torch.float32).train(), tokens(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())
    exact = tiny_model(variant)(ids, labels=ids).loss.item()
    assert loss.item() == pytest.approx(exact, rel=0.02)


def test_hidden_states_and_attentions_are_returned():
    model = tiny_model("gva-drope-16")
    model.set_attn_implementation("eager")
    out = model(tokens(2, 6), output_attentions=True, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    assert [tuple(a.shape) for a in out.attentions] == [(2, 4, 6, 6)] * 2
    torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(2, 4, 6, dtype=torch.float64))
    step = model(tokens(2, 1), past_key_values=out.past_key_values, output_attentions=True)
    assert [tuple(a.shape) for a in step.attentions] == [(2, 4, 1, 7)] * 2


def test_logits_to_keep_and_embeddings_as_input():
    model, ids = tiny_model("gva-drope-16"), tokens(2, 6)
    whole = model(ids).logits
    assert torch.equal(model(ids, logits_to_keep=2).logits, whole[:, -2:])
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, whole)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=model.get_input_embeddings()(ids))


def test_embeddings_can_be_resized():
    model = tiny_model("gva-drope-16", torch.float32)
    model.resize_token_embeddings(120)
    assert model(tokens(1, 4)).logits.shape[-1] == 120
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("variant", ["gva-drope-16", "gva-variance-fixed"])
def test_a_foreign_cache_is_refused(variant):
    cache = DynamicCache(config=tiny_config("gqa"))
    tiny_model("gqa")(tokens(2, 4), past_key_values=cache)
    with pytest.raises(ValueError, match=r"past_key_values: layer 0 holds keys of shape \(2, 2, 4, 32\)"):
        tiny_model(variant)(tokens(2, 1), past_key_values=cache)


def test_caches_of_another_kind_depth_or_precision_are_refused():
    model = tiny_model("gva-drope-16")
    with pytest.raises(TypeError, match=r"past_key_values=tuple: must be a transformers Cache"):
        model(tokens(1, 2), past_key_values=((torch.zeros(1), torch.zeros(1)),))
    for depth in (1, 3):
        cache = DynamicCache(config=tiny_config("gva-drope-16", num_hidden_layers=depth))
        with pytest.raises(ValueError, match=f"past_key_values: has {depth} layers, this model 2"):
            model(tokens(1, 2), past_key_values=cache)
    cache = DynamicCache(config=model.config)
    tiny_model("gva-drope-16", torch.float32)(tokens(1, 2), past_key_values=cache)
    with pytest.raises(ValueError, match=r"holds keys of shape .* torch.float32, this model caches .* torch.float64"):
        model(tokens(1, 2), past_key_values=cache)


@pytest.mark.parametrize("variant", ["gqa", "gva-drope-16", "gva-variance-fixed"])
def test_lengths_past_the_limit_are_refused(variant):
    model = tiny_model(variant, torch.float32)
    with pytest.raises(ValueError, match=r"129 tokens after 0 cached ones exceed max_position_embeddings=128"):
        model(tokens(1, 129))
    cache = DynamicCache(config=model.config)
    model(tokens(1, 128), past_key_values=cache)
    with pytest.raises(ValueError, match=r"1 tokens after 128 cached ones exceed"):
        model(tokens(1, 1), past_key_values=cache)
    with pytest.raises(ValueError, match=r"static cache of 200 tokens exceeds max_position_embeddings=128"):
        model(tokens(1, 4), past_key_values=StaticCache(config=model.config, max_cache_len=200))
    with pytest.raises(ValueError, match=r"static cache of 8 tokens cannot take 9"):
        model(tokens(1, 9), past_key_values=StaticCache(config=model.config, max_cache_len=8))
    with pytest.raises(ValueError, match=r"max_length=130 .* exceeds max_position_embeddings=128"):
        model.generate(tokens(1, 10), max_new_tokens=120)


def test_missing_and_truncated_shards_are_named(tmp_path):
    tiny_model("gva-drope-16", torch.float32).save_pretrained(tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    content = shards[1].read_bytes()
    for keep in (len(content) - 4, 100, 3, 0):
        shards[1].write_bytes(content[:keep])
        with pytest.raises(OSError, match=f"{shards[1].name}: {keep} bytes"):
            GvaForCausalLM.from_pretrained(tmp_path)
    shards[1].unlink()
    with pytest.raises(OSError, match=f"1 of {len(shards)} shards are missing .{shards[1].name}"):
        GvaForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(OSError, match="not a readable shard index"):
        GvaForCausalLM.from_pretrained(tmp_path)


def test_a_checkpoint_of_another_variant_is_noticed(tmp_path):
    tiny_model("gqa", torch.float32).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    other = {**config, **tiny_config("gva-drope-16").to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(other, default=str))
    _, info = GvaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert any("key_map" in key for key in info["missing_keys"])
    assert any("k_proj" in key for key in info["unexpected_keys"])
