"""What a conversion keeps when nothing has to go, what it counts, and that it goes on after a stop."""

import json

import pytest
import torch

from gva import GvaForCausalLM, cost
from gva.cli import main
from gva.convert.converter import Conversion, Request
from gva.convert.importer import import_checkpoint
from gva.convert.layer import cut_rotation, read_layer
from gva.convert.moments import Moments, distances, gather
from gva.convert.targets import MAKERS, Split
from gva.diagnostics import cache_scalars_per_token_per_layer
from gva.evaluate.scoring import model_losses
from sources import saved

pytestmark = pytest.mark.hf


def tokens(*shape):
    return torch.randint(0, 98, shape, generator=torch.Generator().manual_seed(3))


CASES = ["llama 3", "biases", "yarn", "qwen2", "llama 2"]


def source_of(tmp_path, case="llama 3"):
    saved(tmp_path / "theirs", case)
    import_checkpoint(tmp_path / "theirs", tmp_path / "source")
    return GvaForCausalLM.from_pretrained(tmp_path / "source").double().eval().requires_grad_(False)


def conversion(source, folder, target="gva", cache=None, **request):
    cache = cache or source.config.row.scalars
    text = torch.randint(0, 98, (12, 24), generator=torch.Generator().manual_seed(1))
    made = Conversion(source, Request(target, cache, text, 4, **request), folder, say=lambda line: None)
    made.calibrate()
    return made


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", ["gva", "mla"])
def test_where_nothing_is_cut_and_nothing_left_out_logits_stay(case, target, tmp_path):
    source = source_of(tmp_path, case)
    config = source.config
    made = conversion(source, tmp_path, target, slice=None)
    values = config.num_value_groups * config.value_head_dim
    converted = made.convert([Split(values - 2, values + 2)] * config.num_hidden_layers)  # one pair stands still
    made.distances[:] = 0
    made.distances[:, 0] = 1  # and every token looks at itself alone: then a constant is right
    text = torch.randint(0, 98, (2, 1))
    still = made.convert([Split(values - 2, values + 2)] * config.num_hidden_layers)
    torch.testing.assert_close(still(text).logits, source(text).logits, rtol=1e-8, atol=1e-8)
    assert (converted(text).logits - source(text).logits).abs().max() > 0


@pytest.mark.parametrize("case", CASES)
def test_every_pair_that_rotates_scores_as_before(case, tmp_path):
    """The slice alone, all pairs in it: q' . k' of two tokens any distance apart is the source's score."""
    source = source_of(tmp_path, case)
    made = conversion(source, tmp_path)
    layer = read_layer(source, 0, made.moments.of(0))
    G, d = layer.k.shape[:2]
    rotated, turns, content, cut = cut_rotation(layer, G * d, made.distances[0])
    assert len(content.of) == 0
    assert cut == 0
    assert sorted(turns.tolist()) == sorted(layer.turns.repeat(G).tolist())
    x, y = torch.randn(2, layer.q.shape[-1], dtype=torch.float64)

    def turned(pairs, at, frequencies):
        first, second = pairs.chunk(2, -1)
        cos, sin = (at * frequencies).cos(), (at * frequencies).sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    q = layer.q @ x
    k = (layer.k @ y).repeat_interleave(layer.group, 0)
    theirs = (turned(q, 9.0, layer.turns) * turned(k, 4.0, layer.turns)).sum(-1) * layer.factor**2
    asked = torch.einsum("hnd,hd->hn", rotated.ask, q)
    ours = (turned(asked, 9.0, turns) * turned(rotated.of @ y, 4.0, turns)).sum(-1)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_moments_are_those_of_what_is_read_and_of_the_gradient(tmp_path):
    source = source_of(tmp_path)
    text = tokens(3, 20)
    found = gather(source, text, tmp_path / "m", batch=2)
    seen = {}
    attention = source.model.layers[1].self_attn
    attention.k_proj.register_forward_hook(
        lambda m, i, out: seen.update(x=i[0], k=out) or out.requires_grad_().retain_grad()
    )
    attention.v_proj.register_forward_hook(lambda m, i, out: seen.update(v=out) or out.requires_grad_().retain_grad())
    with torch.enable_grad():
        model_losses(source)(text[:, :-1], text[:, 1:]).sum().backward()
    x = torch.cat((seen["x"].detach().flatten(0, 1), torch.ones(57, 1)), 1).double()
    g = torch.cat((seen["k"].grad, seen["v"].grad), -1).flatten(0, 1).double()
    torch.testing.assert_close(found.reads[1], x.T @ x)
    torch.testing.assert_close(found.slopes[1], g.T @ g)
    weights = seen["v"].grad.flatten(0, 1).double().square().sum(1)
    torch.testing.assert_close(found.weighed[1], torch.einsum("n,ni,nj->ij", weights, x, x))


def test_distances_are_where_attention_lies(tmp_path):
    source = source_of(tmp_path)
    found = distances(source, tokens(2, 16))
    assert found.shape == (2, 16)
    torch.testing.assert_close(found.sum(1), torch.ones(2).double())
    source.set_attn_implementation("eager")
    weights = source(tokens(2, 16), output_attentions=True).attentions[0].sum((0, 1)).double()
    near = torch.stack([weights.diagonal(-n).sum() for n in range(16)])
    torch.testing.assert_close(found[0], near / near.sum(), rtol=1e-4, atol=1e-6)


def test_a_stopped_calibration_goes_on_and_sums_the_same(tmp_path, monkeypatch):
    source = source_of(tmp_path)
    text = tokens(6, 20)
    whole = gather(source, text, tmp_path / "whole", batch=2)
    saves = []
    save = Moments.save
    monkeypatch.setattr(
        Moments, "save", lambda self, path: (save(self, path), saves.append(path), 1 / (3 - len(saves)))
    )
    with pytest.raises(ZeroDivisionError):
        gather(source, text, tmp_path / "stopped", batch=2, every=1)
    monkeypatch.setattr(Moments, "save", save)
    assert int(Moments.load(tmp_path / "stopped").sequences) == 6
    again = gather(source, text, tmp_path / "stopped", batch=2)
    assert torch.equal(again.reads, whole.reads)
    assert torch.equal(again.slopes, whole.slopes)


@pytest.mark.parametrize(("target", "cache"), [("gva", 32), ("mla", 32), ("gva-own-groups", 56), ("gqa", 32)])
def test_caches_are_as_asked_and_forms_agree(target, cache, tmp_path):
    source = source_of(tmp_path)  # three groups of 16
    made = conversion(source, tmp_path, target, cache)
    converted = made.convert(made.search())
    assert cost.cache_scalars_per_token_per_layer(converted.config) == cache
    text = tokens(2, 20)
    out = converted(text, use_cache=True)
    assert cache_scalars_per_token_per_layer(out.past_key_values) == cache
    if converted.config.absorbs:
        absorbed = converted(text, attention_form="absorbed").logits
        torch.testing.assert_close(absorbed, out.logits, rtol=1e-6, atol=1e-8)
    converted.save_pretrained(tmp_path / "out")
    again = GvaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    torch.testing.assert_close(again(text).logits, out.logits)


def test_one_group_and_a_latent_are_the_same_function(tmp_path):
    source, text = source_of(tmp_path, "biases"), tokens(2, 20)
    models = []
    for target in ("gva", "mla"):
        made = conversion(source, tmp_path, target, 32, slice=8)
        models.append(made.convert(made.search()))
    torch.testing.assert_close(models[0](text).logits, models[1](text).logits, rtol=1e-8, atol=1e-8)


def test_more_cache_loses_less_by_its_own_measure(tmp_path):
    source = source_of(tmp_path)
    made = conversion(source, tmp_path, "gva")
    layer, maker = read_layer(source, 0, made.moments.of(0)), MAKERS["gva"]
    states = [maker.layer(layer, Split(12, state), made.distances[0]).lost for state in (12, 24, 48, 84)]
    assert [one.content for one in states] == sorted((one.content for one in states), reverse=True)
    assert states[-1].content < 1e-6 * states[0].content, "there is no more than that"
    slices = [maker.layer(layer, Split(width, 12), made.distances[0]).lost for width in (4, 12, 24, 44)]
    assert [one.cut for one in slices] == sorted((one.cut for one in slices), reverse=True)


def test_the_search_takes_the_lowest_loss_and_stays_within_its_budget(tmp_path):
    source = source_of(tmp_path)
    made = conversion(source, tmp_path, "gva", 48)
    splits = made.search()
    assert len(made.losses) <= 12
    assert made.loss(splits) == min(made.losses.values())
    assert len({sum(split) for split in splits}) == 1
    again = conversion(source, tmp_path, "gva", 48)
    before = dict(again.losses)
    again.search()
    assert again.losses == before, "what was found is not run again"


# ---- the command ----


def text_file(tmp_path):
    generator = torch.Generator().manual_seed(2)
    path = tmp_path / "text.jsonl"
    rows = (" ".join(f"t{i}" for i in torch.randint(0, 98, (60,), generator=generator).tolist()) for _ in range(60))
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def command(tmp_path, *more, cache="32", out="out"):
    return main(
        ["convert", str(tmp_path / "source"), "--out", str(tmp_path / out), "--cache", cache, "--length", "32",
         "--calibrate", str(tmp_path / "text.jsonl"), "--tokens", "1024", "--search-tokens", "128",
         "--device", "cpu", *more]
    )  # fmt: skip


def test_the_command_writes_a_model_its_record_and_a_card(tmp_path, capsys):
    source_of(tmp_path)
    text_file(tmp_path)
    assert command(tmp_path, cache="34%") == 0  # of 96: 32
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["cache"] == {"source": 96.0, "converted": 32.0}
    assert list(record["losses"]) == ["source", "rotation cut", "converted"]
    assert set(record["losses"]["source"]) == {"calibration", "held out"}
    told = capsys.readouterr().out
    assert "32 scalars in the cache of a layer instead of 96 (-66.7%)" in told
    assert "| source |" in (tmp_path / "out" / "README.md").read_text()
    assert GvaForCausalLM.from_pretrained(tmp_path / "out").config.num_value_groups == 1
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not list(tmp_path.glob(".out*")), "nothing is left beside it"
    assert main(["generate", str(tmp_path / "out"), "--prompt", "t5 t6", "--max-new-tokens", "4"]) == 0


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, capsys):
    source_of(tmp_path)
    text_file(tmp_path)
    for more, told in [
        ({"cache": "96"}, "must be less than the 96"),
        ({"cache": "much"}, "must be scalars per token and layer, or percent"),
        ({"cache": "30"}, "must be a multiple of 4"),
    ]:
        assert command(tmp_path, **more) == 2
        assert told in capsys.readouterr().err
    assert command(tmp_path, "--to", "gqa", cache="64") == 2
    assert "must be one of [32]" in capsys.readouterr().err
    assert command(tmp_path, "--slice", "7") == 2
    assert "slice=7" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "theirs"), "--out", str(tmp_path / "out"), "--cache", "32",
                 "--calibrate", str(tmp_path / "text.jsonl")]) == 2  # fmt: skip
    assert "gva import" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_stopped_conversion_goes_on_with_the_same_request_alone(tmp_path, monkeypatch, capsys):
    source_of(tmp_path)
    text_file(tmp_path)
    monkeypatch.setattr(Conversion, "search", lambda self: 1 / 0)
    assert command(tmp_path) == 2
    assert (tmp_path / ".out.converting" / "moments.safetensors").is_file()
    monkeypatch.undo()
    assert command(tmp_path, cache="40") == 2
    assert "cache: 32 -> 40" in capsys.readouterr().err
    assert command(tmp_path) == 0
    assert not (tmp_path / ".out.converting").exists()
