"""A config resolves what it can, refuses what it must by name, and survives a round trip."""

import json
import warnings

import pytest

from gva import PRESETS, VARIANTS, GvaConfig, GvaForCausalLM
from models import tiny_config, tiny_model

pytestmark = pytest.mark.hf


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_preset_builds_every_variant(preset, variant):
    config = GvaConfig.preset(preset, variant=variant)
    for field, value in VARIANTS[variant].items():
        assert getattr(config, field) == value
    assert config.num_attention_heads % config.num_value_groups == 0
    if variant == "mla":
        size = PRESETS[preset]
        assert config.latent_dim == size["num_value_groups"] * size["value_head_dim"]
        assert config.rope_dim == 16


def test_the_documented_sizes():
    small, paper = (GvaConfig.preset(name, variant="gqa") for name in ("small", "paper-350m"))
    assert (small.num_hidden_layers, small.hidden_size, small.num_attention_heads) == (8, 512, 8)
    assert (small.num_value_groups, small.value_head_dim, small.intermediate_size) == (2, 64, 1408)
    assert small.max_position_embeddings == 1024
    assert (paper.num_hidden_layers, paper.hidden_size, paper.num_attention_heads) == (24, 1024, 16)
    assert (paper.num_value_groups, paper.value_head_dim, paper.intermediate_size) == (4, 64, 3072)
    assert paper.vocab_size == 50304
    assert paper.tie_word_embeddings


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_through_json(tmp_path, variant):
    config = GvaConfig.preset("small", variant=variant, rope_theta=5000.0)
    config.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = GvaConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert loaded.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}


@pytest.mark.parametrize("variant", VARIANTS)
def test_with_variant_keeps_the_size(variant):
    base = GvaConfig.preset("paper-350m", variant="gva-drope-24", max_position_embeddings=512, rope_theta=100.0)
    assert base.with_variant(variant).to_dict() == {
        **GvaConfig.preset("paper-350m", variant=variant, max_position_embeddings=512, rope_theta=100.0).to_dict()
    }


def test_gva_alone_is_what_is_recommended_and_leaves_no_trace_of_its_name(tmp_path):
    for preset in PRESETS:
        config = GvaConfig.preset(preset)
        assert config.to_dict() == GvaConfig.preset(preset, variant="gva").to_dict()
        same = [name for name in VARIANTS if GvaConfig.preset(preset, variant=name).to_dict() == config.to_dict()]
        assert len(same) == 2, "itself and the row that it stands for"
        config.save_pretrained(tmp_path / preset)
        assert GvaConfig.from_pretrained(tmp_path / preset).to_dict() == config.to_dict()


def test_a_slice_is_carved_wherever_the_head_is_wider():
    for preset, allocation in (("demo", "additive"), ("small", "carved"), ("paper-350m", "carved")):
        config = GvaConfig.preset(preset, variant="gva-drope-32")
        assert (config.rope_dim, config.rope_allocation) == (32, allocation)
    assert GvaConfig(rope_dim=64).content_dim == 64


def test_widths():
    carved, additive = (tiny_config("gva-drope-16", rope_allocation=a) for a in ("carved", "additive"))
    assert (carved.content_dim, carved.score_dim, carved.rotated_dim) == (16, 32, 16)
    assert (additive.content_dim, additive.score_dim, additive.rotated_dim) == (32, 48, 16)
    assert (tiny_config("gva-baseline").content_dim, tiny_config("gva-baseline").rotated_dim) == (32, 32)
    assert (tiny_config("gta").content_dim, tiny_config("gta").rope_dim) == (16, 16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"hidden_size": 96, "num_attention_heads": 6, "num_value_groups": 4},
            r"num_value_groups=4: must divide num_attention_heads=6",
        ),
        ({"rope_dim": 15}, r"rope_dim=15: must be even"),
        ({"rope_dim": 64, "rope_allocation": "carved"}, r"rope_dim=64: a carved slice must be smaller than .*additive"),
        (
            {"attention": "mla", "rope_dim": 80, "rope_allocation": "carved"},
            r"rope_dim=80: a carved slice must be smaller than value_head_dim=64",
        ),
        ({"attention": "gq"}, r"attention='gq': must be one of .*did you mean 'gqa'"),
        ({"positional": "rotary"}, r"positional='rotary': must be one of \['decoupled', 'rope'\]"),
        ({"attention": "gqa", "positional": "decoupled"}, r"positional='decoupled': must be one of \['rope'\]"),
        ({"attention": "mla", "positional": "rope"}, r"positional='rope': must be one of \['decoupled'\]"),
        (
            {"attention": "gta", "rope_allocation": "additive"},
            r"rope_allocation='additive': must be one of \['carved'\]",
        ),
        ({"map_init": "xavier"}, r"map_init='xavier': must be one of"),
        ({"map_init": "none", "rope_allocation": "carved"}, r"rope_allocation='carved': without maps .* 'additive'"),
        ({"map_init": "none", "positional": "rope"}, r"map_init='none': must be one of"),
        ({"attention": "gqa", "map_init": "standard"}, r"map_init='standard': only attention='gva'"),
        ({"attention": "gqa", "rope_dim": 16}, r"rope_dim=16: only positional='decoupled'"),
        ({"latent_dim": 64}, r"latent_dim=64: only attention='mla'"),
        ({"attention": "mha", "num_value_groups": 4}, r"num_value_groups=4: mha has one group per head: must be 16"),
        ({"attention": "mqa", "num_value_groups": 4}, r"num_value_groups=4: mqa has one group"),
        ({"attention": "gta", "rope_dim": 16}, r"rope_dim=16: gta has value_head_dim / 2 = 32"),
        ({"attention": "gqa", "value_head_dim": 33}, r"value_head_dim=33: must be even"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers=1000000000: must be 4,096 at most"),
        ({"hidden_size": 0}, r"hidden_size=0: must be a positive integer"),
        ({"hidden_size": "1024"}, r"hidden_size='1024': must be a positive integer"),
        ({"hidden_size": 1000}, r"hidden_size=1000: must be divisible by num_attention_heads=16"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, r"rope_type.*'longrope': must be one of"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, r"rope_parameters=.*low_freq_factor"),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, r"rope_theta=1.0: contradicts"),
        ({"rope_theta": 0}, r"rope_theta=0: must be positive"),
        ({"rope_theta": -5.0}, r"rope_theta=-5.0: must be positive"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters=.*factor"),
        ({"query_norm": "False"}, r"query_norm='False': must be True or False"),
    ],
)
def test_bad_fields_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        GvaConfig(**fields)


def test_a_misspelt_field_names_the_nearest():
    with pytest.raises(TypeError, match=r"no field 'num_value_group'; did you mean 'num_value_groups'"):
        GvaConfig(num_value_group=4)
    with pytest.raises(ValueError, match=r"variant='gva-drop-16'.*did you mean 'gva-drope-16'"):
        GvaConfig.preset("small", variant="gva-drop-16")
    with pytest.raises(ValueError, match=r"preset='smal'.*did you mean 'small'"):
        GvaConfig.preset("smal")


def test_unknown_keys_of_a_file_are_kept_with_a_warning(tmp_path):
    config = GvaConfig.preset("demo").to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_dimm": 8, "provenance": "here"}))
    with pytest.warns(UserWarning, match=r"'rope_dimm'; did you mean 'rope_dim'.*'provenance'"):
        loaded = GvaConfig.from_pretrained(tmp_path)
    assert loaded.provenance == "here"
    assert loaded.to_dict()["provenance"] == "here"


def test_overrides_while_loading_are_checked(tmp_path):
    GvaConfig.preset("demo", variant="gva-drope-16").save_pretrained(tmp_path)
    assert GvaConfig.from_pretrained(tmp_path, rope_dim=8).content_dim == 24
    with pytest.raises(ValueError, match="rope_dim=7"):
        GvaConfig.from_pretrained(tmp_path, rope_dim=7)


def test_another_rope_base_can_be_given_while_loading(tmp_path):
    config = GvaConfig.preset("demo")
    config.save_pretrained(tmp_path)
    for override in ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}):
        for changed in (GvaConfig.from_pretrained(tmp_path, **override), config.with_variant("mla", **override)):
            assert changed.rope_theta == changed.rope_parameters["rope_theta"] == 5e5


def test_a_misspelt_field_while_loading_names_the_nearest(tmp_path):
    tiny_model("gqa").save_pretrained(tmp_path)
    for load in (GvaConfig.from_pretrained, GvaForCausalLM.from_pretrained):
        with pytest.raises(TypeError, match=r"no field 'rope_thta'; did you mean 'rope_theta'"):
            load(tmp_path, rope_thta=8.0)


def test_the_callers_rope_parameters_are_left_alone():
    given = {"rope_type": "linear", "factor": 2.0}
    config = GvaConfig(rope_parameters=given, rope_theta=7.0)
    assert given == {"rope_type": "linear", "factor": 2.0}
    assert config.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}
