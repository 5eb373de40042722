"""The parts of the loop: recipe, schedule, ZClip, optimizer."""

import math
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gva import GvaConfig, cost
from gva.run.folder import differences
from gva.train.optimizer import learning_rate, make_optimizer, named_state, set_learning_rate
from gva.train.recipe import RECIPES, Recipe, build, explained, identity_defaults, identity_of, read_overrides
from gva.train.zclip import ZClip, scale_gradients, total_norm
from models import tiny_config, tiny_model


def test_presets_build_with_overrides():
    for preset in RECIPES:
        config, recipe = build(preset, "gva-drope-16")
        assert recipe.length <= config.max_position_embeddings
    config, recipe = build("small", "gqa", {"num_value_groups": 4, "lr": 1, "steps": 50}, vocab_size=1000)
    assert (config.num_value_groups, config.vocab_size, recipe.lr, recipe.warmup) == (4, 1024, 1.0, 5)


def test_the_papers_tokens():
    assert build("paper-350m", "gqa")[1].tokens == pytest.approx(30e9, rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"stepz": 3}, r"stepz=3: neither a recipe nor a model field; did you mean 'steps'"),
        ({"lr": "fast"}, r"lr='fast': must be of type float"),
        ({"steps": True}, r"steps=True: must be of type int"),
        ({"steps": 0}, r"steps=0: must be positive"),
        ({"precision": "fp8"}, r"precision='fp8': must be one of"),
        ({"lr": -1}, r"lr=-1.0: must be positive"),
        ({"lr": float("nan")}, r"lr=nan: must be positive"),
        ({"map_lr": float("inf")}, r"map_lr=inf: must be positive"),
        ({"min_lr": 1.5}, r"min_lr=1.5: must lie between 0 and 1"),
        ({"weight_decay": -0.1}, r"weight_decay=-0.1: must not be negative"),
        ({"beta1": 1}, r"beta1=1.0: must be at least 0 and below 1"),
        ({"eps": -1}, r"eps=-1.0: must not be negative"),
        ({"seed": -1}, r"seed=-1: must lie between 0 and 2\^63 - 1"),
        ({"data_seed": -1}, r"data_seed=-1: must lie between"),
        ({"eval_every": -1}, r"eval_every=-1: must not be negative"),
        ({"precision": "fp16"}, r"precision='fp16': must be one of .*; did you mean"),
        ({"warmup": 2000}, r"warmup=2000: must lie between 0 and steps=1200"),
        ({"rope_dim": 3}, r"rope_dim=3: must be even"),
    ],
)
def test_bad_fields_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        build("small", "gva-drope-16", overrides)


def test_every_number_of_the_recipe_has_a_range_and_every_field_is_explained():
    shown = explained()
    for field in fields(Recipe):
        assert f"  {field.name}=" in shown
        assert field.metadata["about"] in shown
        assert field.metadata["rule"] is not None or type(field.default) in (bool, str), field.name


def test_overrides_from_files_and_words(tmp_path):
    (tmp_path / "a.toml").write_text('lr = 0.5\nprecision = "fp32"\n')
    (tmp_path / "a.json").write_text('{"lr": 0.5}')
    got = read_overrides(tmp_path / "a.toml", ["lr=2e-3", "zclip=false", "compile=False", "parallel=fsdp"])
    assert got == {"lr": 2e-3, "precision": "fp32", "zclip": False, "compile": False, "parallel": "fsdp"}
    assert read_overrides(tmp_path / "a.json", []) == {"lr": 0.5}
    (tmp_path / "bad.toml").write_text("lr = ")
    with pytest.raises(ValueError, match=r"bad.toml: not readable"):
        read_overrides(tmp_path / "bad.toml", [])
    with pytest.raises(ValueError, match=r"'lr': must be key=value"):
        read_overrides(None, ["lr"])


def test_schedule():
    recipe = Recipe(steps=100, warmup=10, lr=2.0, min_lr=0.1)
    rates = [learning_rate(recipe, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == pytest.approx(2.0)
    assert rates[55] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert learning_rate(recipe, 100) == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def zclip_by_the_book(norms, alpha=0.97, threshold=2.5, warmup=25, eps=1e-6):
    """The paper's algorithm in plain floats: statistics of the first norms, then an EMA of clipped ones."""
    targets, mean, var = [], 0.0, 0.0
    for step, norm in enumerate(norms):
        if step < warmup:
            targets.append(norm)
            if step == warmup - 1:
                mean, var = float(np.mean(norms[:warmup])), float(np.var(norms[:warmup]))
            continue
        deviation = math.sqrt(var)
        z = (norm - mean) / (deviation + eps)
        target = mean + threshold**2 / z * deviation if z > threshold else norm
        mean = alpha * mean + (1 - alpha) * target
        var = alpha * var + (1 - alpha) * (target - mean) ** 2
        targets.append(target)
    return targets


def test_zclip_follows_the_paper():
    rng = np.random.default_rng(0)
    norms = np.abs(rng.normal(1.0, 0.1, 200))
    norms[[3, 40, 41, 120]] = [9.0, 5.0, 50.0, 2.0]
    zclip = ZClip(torch.device("cpu"))
    got = [zclip(torch.tensor(norm)).item() for norm in norms]
    expected = zclip_by_the_book(norms)
    assert got == pytest.approx(expected, rel=1e-9)
    assert got[3] == 9.0, "nothing is clipped during the warm-up"
    assert got[40] < 5.0
    assert got[41] < 50.0
    assert sum(g < n for g, n in zip(got, norms, strict=True)) < 12


def test_gradients_are_scaled_to_the_target_or_left_alone():
    gradients = [torch.full((3,), 2.0), torch.full((1,), 2.0)]
    norm = total_norm(gradients)
    assert norm.item() == pytest.approx(4.0)
    before = [g.clone() for g in gradients]
    scale_gradients(gradients, norm, norm.double())
    assert all(torch.equal(a, b) for a, b in zip(gradients, before, strict=True))
    scale_gradients(gradients, norm, torch.tensor(1.0, dtype=torch.float64))
    assert total_norm(gradients).item() == pytest.approx(1.0)


def test_gains_do_not_decay_and_the_state_names_each_weight_once():
    model = tiny_model("gva-scale-matched", torch.float32)
    optimizer = make_optimizer(model, Recipe())
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert (id(parameter) in decayed) == ("norm" not in name), name
    names = [n for n in named_state(model, optimizer) if n.startswith("model.")]
    assert len(names) == len(list(model.parameters()))
    assert "model.lm_head.weight" not in names


@pytest.mark.parametrize("variant", ["gva-drope-16", "gqa"])
def test_the_maps_move_at_their_own_rate_and_decay_like_the_others(variant):
    model = tiny_model(variant, torch.float32)
    recipe = Recipe(lr=1e-3, map_lr=8.0, weight_decay=0.1)
    optimizer = make_optimizer(model, recipe)
    set_learning_rate(optimizer, 5e-4)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        group = groups.pop(id(parameter))
        assert group["lr"] == pytest.approx(4e-3 if "key_map" in name else 5e-4), name
        if "norm" not in name:
            assert group["lr"] * group["weight_decay"] == pytest.approx(5e-5), name
    assert groups == {}


def test_a_step_of_the_maps_is_as_much_longer_as_their_rate():
    moved = {}
    for map_lr in (1.0, 4.0):
        model = tiny_model("gva-drope-16", torch.float32)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = make_optimizer(model, Recipe(map_lr=map_lr, weight_decay=0.0))
        set_learning_rate(optimizer, 1e-3)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        moved[map_lr] = {name: (before[name] - p).mean().item() for name, p in model.named_parameters()}
    for name, distance in moved[4.0].items():
        assert distance == pytest.approx(moved[1.0][name] * (4 if "key_map" in name else 1), rel=1e-3), name


def test_a_run_from_before_a_field_is_the_run_it_was():
    """What an identity does not have had its default: of the recipe and of the model, whichever field it is."""
    config, recipe = tiny_config("gva-drope-16"), Recipe()
    data = SimpleNamespace(fingerprint="a")
    ours, defaults = identity_of(config, recipe, data, data), identity_defaults()
    young = {"recipe": ["map_lr"], "model": ["layers", "score_scale", "qkv_bias", "output_bias", "latent_norm"]}
    theirs = {part: {k: v for k, v in fields.items() if k not in young.get(part, [])} for part, fields in ours.items()}
    assert differences(theirs, ours, defaults) == {}
    assert set(differences(theirs, ours, {})) >= {"recipe.map_lr", "model.latent_norm"}
    moved = identity_of(config, Recipe(map_lr=2.0), data, data)
    assert differences(theirs, moved, defaults) == {"recipe.map_lr": (1.0, 2.0)}
    other = identity_of(tiny_config("gva-drope-16", qkv_bias=True, layers={1: {"rope_dim": 8}}), recipe, data, data)
    assert set(differences(theirs, other, defaults)) == {"model.qkv_bias", "model.layers.1.rope_dim"}
    with pytest.raises(ValueError, match="map_lr"):
        Recipe(map_lr=0.0)


def test_training_flops_are_those_of_the_usual_count():
    config = GvaConfig.preset("paper-350m", variant="gqa")
    expected = 6 * cost.parameters(config)["total"] + 6 * 24 * 16 * 64 * 2048
    assert cost.train_flops_per_token(config, 2048) == expected
