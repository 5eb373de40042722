"""generate(): every way of decoding gives the tokens of a model that re-reads the whole sequence each time."""

import pytest
import torch
from transformers import CompileConfig, StaticCache

from gva import VARIANTS, PagedGenerator
from gva.ops import backend, decode
from gva.ops.cpu import compile, read
from models import tiny_config, tiny_model, tokens

pytestmark = pytest.mark.hf
CORE = ["gqa", "mla", "gva-drope-16", "gva-variance-fixed"]
NEW = 12


def prompts():
    """Two prompts of different lengths, left-padded."""
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    ids[1, :4], mask[1, :4] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, batch, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(**batch, **options)


@torch.no_grad()
def greedy_by_rereading(model, batch):
    """No cache, no padding, no generate(): each row on its own, the whole sequence at every step."""
    rows = []
    for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        ids = row[mask.bool()][None]
        for _ in range(NEW):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        rows.append(ids[0, -NEW:])
    return torch.stack(rows)


@pytest.fixture(params=VARIANTS)
def model(request):
    return tiny_model(request.param)


@pytest.fixture(params=CORE)
def core_model(request):
    return tiny_model(request.param)


def test_greedy_on_left_padded_rows(model):
    batch = prompts()
    expected = greedy_by_rereading(model, batch)
    assert len(set(expected.flatten().tolist())) > 4, "a constant output would prove little"
    assert torch.equal(generate(model, batch)[:, -NEW:], expected)
    assert torch.equal(generate(model, batch, use_cache=False)[:, -NEW:], expected)
    assert torch.equal(generate(model, batch, cache_implementation="static")[:, -NEW:], expected)


def test_greedy_in_eager_attention(model):
    batch = prompts()
    expected = greedy_by_rereading(model, batch)
    model.set_attn_implementation("eager")
    assert torch.equal(generate(model, batch)[:, -NEW:], expected)


def test_sampling_draws_the_same_with_and_without_a_cache(model):
    batch, drawn = prompts(), []
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        torch.manual_seed(5)
        drawn.append(generate(model, batch, do_sample=True, temperature=0.7, top_k=20, **options))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


def test_beam_search(model):
    batch = prompts()
    options = {"num_beams": 3, "num_return_sequences": 2}
    expected = generate(model, batch, use_cache=False, **options)
    assert torch.equal(generate(model, batch, **options), expected)
    assert torch.equal(generate(model, batch, cache_implementation="static", **options), expected)


def test_either_form_generates(model):
    batch = prompts()
    expected = generate(model, batch)
    for form in ("expanded", "absorbed") if model.config.absorbs else ("expanded",):
        assert torch.equal(generate(model, batch, attention_form=form), expected)


def test_prefill_in_chunks(model):
    batch = prompts()
    expected = generate(model, batch)
    assert torch.equal(generate(model, batch, prefill_chunk_size=4), expected)


@pytest.mark.skipif(compile.missing() is not None, reason=f"needs {compile.missing()}")
@pytest.mark.parametrize("variant", ["gqa", "mla", "gva-drope-16", "gva-one-group", "gva-untied"])
def test_the_kernel_in_c_gives_the_tokens_of_plain_torch(variant, monkeypatch):
    """Every way to decode: on a cache of each kind, padded, in beams, in chunks and drafts, and on pages."""
    fields = {"attention": "gva_untied", "map_init": None} if variant == "gva-untied" else {}
    model = tiny_model("gva-drope-16" if fields else variant, torch.float32, **fields)
    batch, one, calls = prompts(), {"input_ids": tokens(1, 6).repeat(1, 3)}, []

    def every_way():
        found = [
            generate(model, batch, attention_form="absorbed" if model.config.absorbs else None, **options)
            for cache in ({}, {"cache_implementation": "static"})
            for options in (cache, {"num_beams": 3, **cache}, {"prefill_chunk_size": 4, **cache})
        ]
        found += [generate(model, one, prompt_lookup_num_tokens=3), generate(model, one, assistant_model=model)]
        asked = [batch["input_ids"][0].tolist(), one["input_ids"][0].tolist()]
        found += [torch.tensor(PagedGenerator(model, n, 40, page=4).generate(asked, NEW)) for n in (1, 2)]
        return found

    attend = read.attend
    with monkeypatch.context() as patch:
        patch.setattr(read, "attend", lambda *given: calls.append(0) or attend(*given))
        got = every_way()
    assert len(calls) > (200 if model.config.absorbs else 20)
    monkeypatch.setattr(backend, "missing_cpu", lambda *wanted: "a C compiler")
    monkeypatch.setattr(decode, "missing_cpu", lambda *wanted: "a C compiler")
    monkeypatch.setattr(read, "attend", None)
    assert all(torch.equal(*both) for both in zip(got, every_way(), strict=True))


def test_prompt_lookup(core_model):
    batch = {"input_ids": tokens(1, 6).repeat(1, 3)}  # repetition, so that look-ups hit
    expected = generate(core_model, batch)
    assert torch.equal(generate(core_model, batch, prompt_lookup_num_tokens=3), expected)


def test_assisted_decoding(core_model):
    batch = {"input_ids": tokens(1, 10)}
    expected = generate(core_model, batch)
    for assistant in (core_model, tiny_model("gva-drope-16", seed=7, num_hidden_layers=1)):
        assert torch.equal(generate(core_model, batch, assistant_model=assistant), expected)


def test_static_cache_compiled_fullgraph(core_model):
    """One graph for the decode step; a sync or a shape that depends on the length would break it."""
    batch = {"input_ids": tokens(2, 8)}
    expected = generate(core_model, batch)
    compile_config = CompileConfig(fullgraph=True, backend="aot_eager", dynamic=False)
    compile_config._compile_all_devices = True  # generate() leaves CPUs alone otherwise
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counters = torch._dynamo.utils.counters
    got = generate(core_model, batch, cache_implementation="static", compile_config=compile_config)
    assert counters["stats"]["unique_graphs"] >= 1
    assert not counters["graph_break"]
    assert torch.equal(got, expected)


def test_compiled_step_serves_every_length(core_model):
    """Compiled once, the step runs at each later length without compiling again."""
    config, ids = core_model.config, tokens(2, 12)
    cache = StaticCache(config=config, max_cache_len=16)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(core_model, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        core_model(ids[:, :4], past_key_values=cache)
        out = [step(ids[:, t : t + 1], past_key_values=cache).logits for t in range(4, 12)]
        whole = core_model(ids, use_cache=False).logits
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert (torch.cat(out, 1) - whole[:, 4:]).abs().max() < 1e-10


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=["linear", "yarn"],
)
@pytest.mark.parametrize("variant", CORE)
def test_scaled_rope_generates(variant, rope):
    model, batch = tiny_model(variant, rope_parameters=rope), prompts()
    expected = greedy_by_rereading(model, batch)
    assert torch.equal(generate(model, batch)[:, -NEW:], expected)
    plain = tiny_model(variant)
    assert not torch.equal(plain(batch["input_ids"]).logits, model(batch["input_ids"]).logits)


def test_rows_of_one_cache_slot_apart_stay_apart():
    """A value-only cache rotates by slot: rows padded by different amounts must still decode as if alone."""
    model = tiny_model("gva-variance-fixed")
    ids = tokens(3, 12)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, :11], mask[1, :5] = 0, 0
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    assert torch.equal(generate(model, batch)[:, -NEW:], greedy_by_rereading(model, batch))


def test_config_of_generation_survives(tmp_path):
    model = tiny_model("gva-drope-16", torch.float32)
    model.generation_config.eos_token_id = 3
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.generation_config.eos_token_id == 3
    assert again.config.to_dict()["attention"] == tiny_config("gva-drope-16").attention
