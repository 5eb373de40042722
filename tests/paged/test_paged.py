"""The paged cache and the generation loop on it, against HuggingFace's generate on HuggingFace's cache."""

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch._dynamo.testing import CompileCounter
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gva import VARIANTS, cost
from gva.paged import attend
from gva.paged.cache import LAYOUTS, OutOfPages, PagedCache
from gva.paged.generator import PagedGenerator, run_layer
from models import SIZE, tiny_config, tiny_model, tokens

NEW = 7


def hf_greedy(model, prompt, new=NEW):
    ids = torch.tensor([prompt])
    return model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)[0, len(prompt) :].tolist()


def prompts(*lengths):
    return [tokens(1, n)[0].tolist() for n in lengths]


@pytest.mark.parametrize("page", [1, 4, 64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_generate_on_ragged_prompts(variant, page):
    model = tiny_model(variant)
    asked = prompts(1, 9, 4)
    want = [hf_greedy(model, prompt) for prompt in asked]
    for layout in LAYOUTS if model.config.row.packs else (None,):
        got = PagedGenerator(model, batch=3, max_tokens=20, page=page, layout=layout).generate(asked, NEW)
        assert got == want, layout


@pytest.mark.parametrize("fp8", [False, True])
def test_without_maps(fp8):
    model, asked = tiny_model("gva-drope-16", torch.float32, map_init="none"), prompts(3, 11, 20)
    assert cost.parameters(model.config)["total"] == sum(p.numel() for p in model.parameters())
    got = PagedGenerator(model, 3, 40, page=4, prefill_tokens=8, fp8=fp8).generate(asked, NEW)
    if not fp8:
        assert got == [hf_greedy(model, prompt) for prompt in asked]


def test_a_layout_is_chosen_and_one_that_cannot_be_is_refused():
    assert [PagedCache(tiny_config("gva-drope-16"), batch, 8).layout for batch in (1, 2)] == ["separate", "rows"]
    assert PagedCache(tiny_config("gqa"), 2, 8).layout == "separate"
    assert PagedCache(tiny_config("gva-drope-16"), 1, 8, fp8=True).layout == "rows"
    with pytest.raises(ValueError, match=r"layout='rows': attention='gqa' has no rows of one state and one slice"):
        PagedCache(tiny_config("gqa"), 2, 8, layout="rows")
    with pytest.raises(ValueError, match=r"layout='separate': an fp8 token is one packed row"):
        PagedCache(tiny_config("mla"), 2, 8, fp8=True, layout="separate")
    with pytest.raises(ValueError, match=r"layout='row': must be one of .* did you mean 'rows'"):
        PagedCache(tiny_config("mla"), 2, 8, layout="row")


@pytest.mark.parametrize("expanded_tokens", [1, 5, 10_000], ids=["one by one", "in parts", "at once"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_long_prompts_are_prefilled_in_chunks(variant, expanded_tokens, monkeypatch):
    """Passes of 8 tokens, pieces of several prompts in each; what is cached before them at once, or merged by LSE."""
    monkeypatch.setattr(attend, "EXPANDED_TOKENS", expanded_tokens)
    model = tiny_model(variant)
    asked = prompts(29, 8, 16, 3)
    generator = PagedGenerator(model, batch=4, max_tokens=40, page=4, prefill_tokens=8)
    passes = []
    generator.model.model.layers[0].register_forward_pre_hook(lambda m, args: passes.append(len(args[0])))
    got = generator.generate(asked, NEW)
    assert max(passes) == 8
    assert got == [hf_greedy(model, prompt) for prompt in asked]


def test_a_chunked_prefill_caches_what_a_whole_one_does():
    model, (prompt,) = tiny_model("gva-drope-16"), prompts(30)
    pools = []
    for size in (8, 64):
        generator = PagedGenerator(model, batch=1, max_tokens=40, page=4, prefill_tokens=size)
        generator.prefill([0], [prompt])
        slots = generator.cache.slots(torch.arange(30), torch.zeros(30, dtype=torch.long))
        pools.append(torch.cat([part.flatten() for part in generator.cache.layer(1).read(slots)]))
    torch.testing.assert_close(pools[0], pools[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", ["gqa", "mla", "gva-drope-16", "gva-variance-fixed"])
def test_sequences_come_and_go(variant):
    """More prompts than sequences, in a pool that cannot hold them all; every page comes back."""
    model = tiny_model(variant)
    asked = prompts(3, 11, 6, 2, 9, 5, 1)
    generator = PagedGenerator(model, batch=3, max_tokens=20, page=4, pages=12)
    assert generator.generate(asked, NEW) == [hf_greedy(model, prompt) for prompt in asked]
    assert sorted(generator.cache.free) == list(range(1, 13))
    assert generator.cache.seq_lens.tolist() == [0, 0, 0]
    again = PagedGenerator(model, batch=2, max_tokens=20, page=4)
    assert again.generate(asked, NEW) == again.generate(asked, NEW), "what is left in old pages changes nothing"


def test_an_end_token_ends_a_sequence():
    model = tiny_model("gva-drope-16")
    asked = prompts(5, 8)
    whole = [hf_greedy(model, prompt) for prompt in asked]
    end = whole[0][2]
    got = PagedGenerator(model, batch=2, max_tokens=20).generate(asked, NEW, end=end)
    assert got == [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in whole]


@pytest.mark.parametrize("several", [False, True])
def test_the_models_own_end_tokens_end_a_sequence_as_in_transformers(several):
    model, asked = tiny_model("gva-drope-16"), prompts(5, 8)
    whole = [hf_greedy(model, prompt) for prompt in asked]
    model.config.eos_token_id = 97  # what generation_config says comes first
    model.generation_config.eos_token_id = [whole[0][2], whole[1][4]] if several else whole[0][2]
    cut = [hf_greedy(model, prompt) for prompt in asked]
    generator = PagedGenerator(model, batch=2, max_tokens=20, page=4)
    assert generator.generate(asked, NEW) == cut != whole
    assert generator.generate(asked, NEW, end=()) == whole
    assert generator.generate(asked, NEW, end=whole[1][0])[1] == whole[1][:1]
    tokens = [(number, token) for number, token in generator.stream(asked, NEW)]
    assert [[token for number, token in tokens if number == i] for i in range(2)] == cut
    model.generation_config.eos_token_id = None
    assert PagedGenerator(model, 1, 20).ends == {97}


def test_strings_are_answered_by_strings():
    """A tokenizer that marks spaces, and drops the one at the start of what it decodes."""
    words = ["<unk>", "</s>", "<s>", *(f"▁{letter * n}" for letter in "abcdefgh" for n in range(1, 12))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    model = tiny_model("gva-drope-16", vocab_size=len(words))
    generator = PagedGenerator(model, batch=2, max_tokens=20, page=4, tokenizer=tokenizer)
    asked = ["aaa bb", "c"]
    ids = [tokenizer(text)["input_ids"] for text in asked]
    new = [hf_greedy(model, i) for i in ids]
    got = generator.generate(asked, NEW)
    assert got == ["".join(f" {words[i].lstrip('▁')}" for i in n if i != 2) for n in new]
    assert generator.generate([asked[0], ids[1]], NEW) == [got[0], new[1]]
    first = generator.generate(asked[:1], NEW, end=new[0][2])
    assert first == ["".join(f" {words[i].lstrip('▁')}" for i in new[0][:2])]
    assert generator.ends == {1}, "the tokenizer's, where the model names none"
    with pytest.raises(ValueError, match=r"prompt='a': is a string; give PagedGenerator a tokenizer"):
        PagedGenerator(model, 1, 20).generate(["a"], NEW)


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ("two words", "prompts='two words': is one string; give a list of them"),
        ([1, 2], "prompt=1: must be a list of tokens, or a string"),
        ([[1, SIZE["vocab_size"]]], rf"prompt=\[{SIZE['vocab_size']}\]: is no token of the model, which has 0 to"),
        ([[-1]], r"prompt=\[-1\]: is no token of the model"),
        ([[1.5]], r"prompt=\[1\.5\]: is no token of the model"),
        ([[1], []], r"prompt 1=\[\]: must have at least one token"),
    ],
    ids=lambda value: "" if isinstance(value, str) else repr(value),
)
def test_what_is_no_prompt_is_told_before_anything_is_read(prompts, told):
    """A token that the model does not have would end a process on a GPU; a string is letters, each of them a prompt."""
    generator = PagedGenerator(tiny_model("gva-drope-16"), batch=2, max_tokens=20, page=4)
    for call in (generator.generate, lambda *words: list(generator.stream(*words))):
        with pytest.raises(ValueError, match=told):
            call(prompts, NEW)
    assert generator.generate(torch.tensor([[1, 2]]), 2) == generator.generate([[1, 2]], 2)


def test_a_model_of_another_family_is_refused():
    other = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=8, num_hidden_layers=1))
    with pytest.raises(ValueError, match="model='LlamaForCausalLM': must be a GvaForCausalLM; gva import makes one"):
        PagedGenerator(other, 1, 8)


def test_streaming_and_a_reader_that_leaves():
    generator = PagedGenerator(tiny_model("gva-drope-16"), batch=2, max_tokens=20, page=4)
    stream = generator.stream(prompts(5, 8), NEW)
    assert [next(stream)[0] for _ in range(2)] == [0, 1]
    stream.close()
    assert len(generator.cache.free) == 10, "its pages came back"


def test_a_second_stream_is_refused_and_the_first_goes_on():
    model, asked = tiny_model("gva-drope-16"), prompts(5, 8)
    generator = PagedGenerator(model, batch=2, max_tokens=20, page=4)
    first, second = generator.stream(asked, NEW), generator.stream(prompts(7), NEW)
    got = [next(first)]
    with pytest.raises(RuntimeError, match=r"in the middle of a stream, .*; read it to its end or close"):
        next(second)
    got += first
    answers = [[token for number, token in got if number == i] for i in range(2)]
    assert answers == [hf_greedy(model, prompt) for prompt in asked]
    assert generator.generate(asked, NEW) == answers, "it is free again"


def test_sampling_follows_the_model():
    """At a high temperature tokens spread, at a low one they are the greedy ones."""
    model, (prompt,) = tiny_model("gva-drope-16"), prompts(6)
    cold = PagedGenerator(model, 1, 20, temperature=1e-4).generate([prompt], NEW)
    assert cold == [hf_greedy(model, prompt)]
    hot = [tuple(PagedGenerator(model, 1, 20, temperature=2.0, seed=n).generate([prompt], NEW)[0]) for n in range(4)]
    assert len(set(hot)) > 1
    few = PagedGenerator(model, 1, 20, temperature=2.0, top_k=1).generate([prompt], NEW)
    sure = PagedGenerator(model, 1, 20, temperature=2.0, top_p=1e-6).generate([prompt], NEW)
    assert few == sure == cold


@pytest.mark.parametrize("options", [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 30, "top_p": 0.8}])
def test_what_is_drawn_follows_from_the_seed_and_the_number_of_the_prompt(options):
    """Not from who is beside it, nor from its sequence, nor from where its prompt was cut."""
    model, asked = tiny_model("gva-drope-16"), prompts(5, 11, 3, 9)
    asked[3] = asked[0]
    options = {"temperature": 1.0, "page": 4, **options}
    want = PagedGenerator(model, 4, 20, seed=3, **options).generate(asked, NEW)
    for batch, chunk in ((1, 64), (3, 4)):
        generator = PagedGenerator(model, batch, 20, seed=3, prefill_tokens=chunk, **options)
        assert generator.generate(asked, NEW) == want
        assert generator.generate(asked, NEW) == want
    assert want[0] != want[3], "the same prompt in another place"
    assert PagedGenerator(model, 4, 20, seed=4, **options).generate(asked, NEW) != want


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_pools_hold_what_the_paper_counts(variant):
    config = tiny_config(variant)
    cache = PagedCache(config, batch=3, max_tokens=64, page=16, dtype=torch.bfloat16)
    pages = 3 * 4 + 1  # one that belongs to nobody
    assert cache.nbytes == pages * 16 * cost.cache_bytes_per_token(config)


@pytest.mark.parametrize("variant", ["gva-drope-16", "mla", "gta"])
def test_an_fp8_cache_is_smaller_and_close(variant):
    """Rows of the counted size; logits move by what e4m3 (three bits of mantissa) makes of the values."""
    model, asked = tiny_model(variant, torch.float32, std=0.05), prompts(12, 9)
    plain, packed = (PagedGenerator(model, 2, 32, page=4, fp8=fp8) for fp8 in (False, True))
    pages = 2 * 8 + 1
    assert packed.cache.nbytes == pages * 4 * cost.cache_bytes_per_token(model.config, "fp8")
    seen = []
    for generator in (plain, packed):
        generator.prefill([0, 1], asked)
        generator.tokens.fill_(5)
        generator.cache.reserve([1, 1])
        logits = []
        generator.sampler = SimpleNamespace(choose=lambda x, *_, logits=logits: logits.append(x) or x.argmax(-1))
        generator.step()
        seen.append(logits[0])
    error = (seen[1] - seen[0]).abs().max() / seen[0].abs().max()
    assert 0 < error < 2**-4
    with pytest.raises(ValueError, match=r"fp8=True: attention='gqa' has no rows of one state and one slice"):
        PagedGenerator(tiny_model("gqa"), 1, 8, fp8=True)


def test_pages_are_handed_out_as_sequences_grow():
    cache = PagedCache(tiny_config("gva-drope-16"), batch=2, max_tokens=32, page=8, pages=5)
    cache.reserve([9, 1])
    cache.advance([9, 1])
    assert [len(owned) for owned in cache.owned] == [2, 1]
    with pytest.raises(OutOfPages, match="3 pages of 8 tokens are needed, 2 are free"):
        cache.reserve([8, 16])
    assert len(cache.free) == 2, "nothing was taken"
    with pytest.raises(ValueError, match=r"tokens of sequence 0=33: exceed max_tokens"):
        cache.reserve([24, 0])
    cache.release(0)
    cache.reserve([0, 24])
    assert len(cache.owned[1]) == 4
    assert 0 not in cache.owned[1]


def test_what_does_not_fit_is_told():
    model = tiny_model("gva-drope-16")
    with pytest.raises(ValueError, match=r"max_tokens=500: must lie between 1 and 128"):
        PagedGenerator(model, 1, 500)
    with pytest.raises(OutOfPages, match="prompt 0 needs 5 pages, the cache has 2"):
        PagedGenerator(model, 1, 20, page=4, pages=2).generate(prompts(12), NEW)
    generator = PagedGenerator(model, 1, 20, page=4)
    with pytest.raises(ValueError, match=r"prompt 1=21: tokens, the new ones counted, exceed max_tokens=20"):
        generator.generate(prompts(3, 14), NEW)
    with pytest.raises(ValueError, match=r"prompt 0=\[\]: must have at least one token"):
        generator.generate([[]], NEW)


def test_low_precision_generates():
    model = tiny_model("gva-drope-16", torch.bfloat16)
    got = PagedGenerator(model, batch=2, max_tokens=20).generate(prompts(4, 6), NEW)
    assert [len(tokens) for tokens in got] == [NEW, NEW]


@pytest.mark.parametrize("variant", ["gqa", "mla", "gva-drope-16", "gva-variance-fixed"])
def test_a_compiled_step_gives_the_tokens_of_an_eager_one(variant):
    """One graph serves all layers, breaks nowhere, and writes the pages that it is given."""
    torch._dynamo.reset()
    model, asked = tiny_model(variant), prompts(3, 11)
    eager = PagedGenerator(model, batch=2, max_tokens=32, page=4)
    compiled = PagedGenerator(model, batch=2, max_tokens=32, page=4, compile=True)
    counter = CompileCounter()
    compiled._compiled_layer = torch.compile(run_layer, fullgraph=True, dynamic=False, backend=counter)
    assert compiled.generate(asked, NEW) == eager.generate(asked, NEW)
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("variant", ["gqa", "mla", "gva-drope-16", "gva-variance-fixed"])
def test_a_captured_step_gives_the_tokens_of_an_eager_one(variant, compiled):
    model = tiny_model(variant, torch.float32).cuda()
    asked = prompts(3, 11, 6, 2, 9)
    eager = PagedGenerator(model, batch=3, max_tokens=64, cuda_graph=False).generate(asked, 40)
    graph = PagedGenerator(model, batch=3, max_tokens=64, cuda_graph=True, compile=compiled)
    assert graph.generate(asked, 40) == eager


@pytest.mark.gpu
def test_a_captured_step_draws_what_an_eager_one_draws():
    model = tiny_model("gva-drope-16", torch.float32).cuda()
    asked = prompts(3, 11, 6, 2, 9)
    options = {"batch": 3, "max_tokens": 64, "temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 5}
    eager, graph = (PagedGenerator(model, cuda_graph=captured, **options) for captured in (False, True))
    want = eager.generate(asked, 40)
    assert len({token for tokens in want for token in tokens}) > 20
    assert graph.generate(asked, 40) == graph.generate(asked, 40) == want
