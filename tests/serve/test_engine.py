"""vLLM's engine on toy checkpoints, in float32, against the HuggingFace model: every feature that touches the cache."""

import gc

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-serve")

import torch
from served import (
    bytes_per_token,
    check_greedy,
    counters,
    free_pages,
    greedy,
    ragged_prompts,
    scheduler,
    start,
    write_checkpoint,
)
from vllm import SamplingParams

from gva import PagedGenerator, cost
from gva.data.publish import publish
from gva.paged import attend
from gva.serve import backend
from gva.serve.checks import check_checkpoint
from models import SIZE, made_to_end
from toys import registered

STOCK_BLOCK = 32  # the smallest that vLLM's own attention takes on a CPU


@pytest.fixture
def engine():
    """engine(folder, **options); pages must all be free again when the test ends."""
    engines = []

    def make(folder, **options):
        engines.append(start(folder, **options))
        return engines[-1]

    yield make
    for made in engines:
        assert scheduler(made).get_num_unfinished_requests() == 0
        assert free_pages(made) == scheduler(made).kv_cache_config.num_blocks - 1  # vLLM keeps page 0 to itself
    engines.clear()
    gc.collect()


def test_a_folder_without_weights(checkpoints, engine, tmp_path):
    """A config and a tokenizer: vLLM draws what is missing, and decodes text with it."""
    folder, _ = checkpoints("gva-drope-16")
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    served = engine(tmp_path, load_format="dummy", skip_tokenizer_init=False, block_size=16)
    (result,) = served.generate(["abc"], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert len(result.outputs[0].token_ids) == 5


@pytest.mark.parametrize(
    ("variant", "block"),
    [("gva-drope-16", 16), ("gva-drope-16", 128), ("mla", 16), ("mla", 128), ("gqa", STOCK_BLOCK), ("gqa", 128)],
)
def test_ragged_batch_and_prefix_cache(checkpoints, engine, variant, block):
    folder, model = checkpoints(variant)
    served, prompts = engine(folder, block_size=block), ragged_prompts()
    answers, found = greedy(served, prompts)
    assert sum(found) == 0
    check_greedy(model, prompts, answers)
    answers, found = greedy(served, prompts)  # whole pages of the longer prompts are still there
    assert found == [(len(p) - 1) // block * block for p in prompts]
    check_greedy(model, prompts, answers)
    assert bytes_per_token(served) == cost.cache_bytes_per_token(model.config, "float32")


@pytest.mark.parametrize(
    ("variant", "overrides"),
    [
        ("mha", {}),
        ("mqa", {}),
        ("gta", {}),
        ("gva-drope-24", {"tie_word_embeddings": False}),
        ("gva-drope-16", {"rope_allocation": "additive", "query_norm": True}),
        ("gva-drope-16", {"num_value_groups": 4, "value_head_dim": 24, "rope_dim": 8}),
        ("gva-drope-16", {"map_init": "none", "rope_dim": 32}),
        (
            "gva-drope-16",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
        ),
        ("mla", {"latent_dim": 40, "query_norm": True}),
    ],
)
def test_other_configurations(checkpoints, engine, variant, overrides):
    folder, model = checkpoints(variant, **overrides)
    block = STOCK_BLOCK if variant in ("mha", "mqa") else 16
    served, prompts = engine(folder, block_size=block), ragged_prompts((1, 17, 200))
    check_greedy(model, prompts, greedy(served, prompts)[0])
    assert bytes_per_token(served) == cost.cache_bytes_per_token(model.config, "float32")


@pytest.mark.parametrize("variant", ["gva-drope-16", "mla", "gta"])
@pytest.mark.parametrize("expanded_tokens", [attend.EXPANDED_TOKENS, 64])
def test_chunked_prefill(checkpoints, engine, monkeypatch, variant, expanded_tokens):
    """Prompts come in pieces of 32 tokens beside running requests. A piece attends expanded to all before it; where
    that would be too many, part by part."""
    monkeypatch.setattr(attend, "EXPANDED_TOKENS", expanded_tokens)
    kinds, parts = set(), []
    in_parts = attend.Expanded._in_parts
    monkeypatch.setattr(attend.Expanded, "_in_parts", lambda *args: (parts.append(1), in_parts(*args))[1])
    build = backend.StepBuilder.build

    def record(self, *args, **kwargs):
        step = build(self, *args, **kwargs)
        kinds.update((len(step.stretches), type(s).__name__, getattr(s, "slots", None) is None) for s in step.stretches)
        return step

    monkeypatch.setattr(backend.StepBuilder, "build", record)
    folder, model = checkpoints(variant)
    served = engine(folder, block_size=16, max_num_batched_tokens=32, enable_chunked_prefill=True, max_num_seqs=8)
    prompts = ragged_prompts()
    check_greedy(model, prompts, greedy(served, prompts)[0])
    assert any(count > 1 for count, *_ in kinds)  # decoding requests and prompts in one step
    assert any(name == "Expanded" and fresh for _, name, fresh in kinds)
    assert any(name == "Expanded" and not fresh for _, name, fresh in kinds)
    assert bool(parts) == (expanded_tokens == 64)


def test_an_attention_that_the_package_does_not_have(tmp_path, engine):
    """A class that a test derives and registers is served as it is: nothing under gva.serve knows of it."""
    with registered("toy") as name:
        sizes = {"num_attention_heads": 6, "num_value_groups": 3, "value_head_dim": 24, "rope_dim": 8}
        folder, model = write_checkpoint(tmp_path, "gva-drope-16", attention=name, **sizes)
        served, prompts = engine(folder, block_size=16, max_num_batched_tokens=64), ragged_prompts()
        for _ in range(2):  # the second time with whole pages from the first
            check_greedy(model, prompts, greedy(served, prompts)[0])
        assert bytes_per_token(served) == model.config.num_hidden_layers * (3 * 24 + 8) * 4
    with registered("toy-expanded") as name:
        folder, _ = write_checkpoint(tmp_path / "other", "gva-drope-16", attention=name, **sizes)
        with pytest.raises(ValueError, match="attention='toy-expanded' cannot be served: it has no absorbed form"):
            check_checkpoint(folder)


@pytest.mark.parametrize("variant", ["gva-drope-16", "mla"])
def test_preemption(checkpoints, engine, variant):
    """A cache too small for all requests: some are thrown out half-way and begin again."""
    folder, model = checkpoints(variant)
    served = engine(folder, block_size=16, num_gpu_blocks_override=36, enable_prefix_caching=False)
    prompts = ragged_prompts((60, 61, 62, 63, 64, 65, 66, 67))
    answers, _ = greedy(served, prompts, new=40)
    assert counters(served)["vllm:num_preemptions"] > 0
    check_greedy(model, prompts, answers)


@pytest.mark.parametrize("variant", ["gva-drope-16", "mla", "gta"])
def test_fp8_cache(checkpoints, engine, variant):
    """The packed row of `gva.ops.layout`: as many bytes as `gva.cost` counts, and the tokens of our own generator on
    the same rows."""
    folder, model = checkpoints(variant)
    served, prompts = engine(folder, block_size=16, kv_cache_dtype="fp8"), ragged_prompts((1, 17, 33, 120))
    answers, _ = greedy(served, prompts, new=12)
    assert bytes_per_token(served) == cost.cache_bytes_per_token(model.config, "fp8")
    own = PagedGenerator(model, len(prompts), 256, page=16, fp8=True).generate(prompts, 12)
    assert answers == own


def test_a_prompt_past_the_context_is_refused_and_the_engine_lives(checkpoints, engine):
    folder, model = checkpoints("gva-drope-16")
    served = engine(folder, block_size=16)
    with pytest.raises(Exception, match=r"maximum context length is 512"):
        greedy(served, [[1] * 600])
    prompts = ragged_prompts((5,))
    check_greedy(model, prompts, greedy(served, prompts)[0])


def test_half_precision_runs(checkpoints, engine):
    """In bfloat16 tokens may differ from float32's; the cache is half as large, and the engine answers."""
    folder, model = checkpoints("gva-drope-16")
    served = engine(folder, block_size=16, dtype="bfloat16")
    answers, _ = greedy(served, ragged_prompts((17, 100)))
    assert [len(a) for a in answers] == [24, 24]
    assert bytes_per_token(served) == cost.cache_bytes_per_token(model.config, "bfloat16")
    assert next(served.llm_engine.model_executor.driver_worker.worker.get_model().parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("variant", ["gva-drope-16", "mla", "gqa"])
def test_all_but_attention_is_one_graph(checkpoints, engine, monkeypatch, variant):
    """What vLLM hands to the compiler in a half-precision model: one graph of the whole step, which falls into pieces
    at attention alone, the same for our layers and for vLLM's own; its angles are float32."""
    from vllm import envs
    from vllm.compilation.backends import split_graph
    from vllm.config import CompilationConfig

    graphs, ops = [], [*CompilationConfig._attention_ops, "vllm::unified_kv_cache_update"]
    monkeypatch.setattr(envs, "VLLM_USE_AOT_COMPILE", False)
    monkeypatch.setattr(envs, "VLLM_DISABLE_COMPILE_CACHE", True)
    backend = lambda graph, inputs: (graphs.append(graph), graph.forward)[1]  # noqa: E731
    monkeypatch.setattr(CompilationConfig, "init_backend", lambda *args, **kwargs: backend)
    folder, model = checkpoints(variant)
    served = engine(folder, block_size=STOCK_BLOCK, dtype="bfloat16", enforce_eager=False)
    greedy(served, ragged_prompts((1, 17, 100)))
    (graph,) = graphs
    angles = [n.meta["example_value"] for n in graph.graph.nodes if n.target in ("cos", "sin", torch.cos, torch.sin)]
    assert [a.dtype for a in angles] == [torch.float32] * 2
    _, pieces = split_graph(graph, ops)
    assert [p.is_splitting_graph for p in pieces] == [False, True] * model.config.num_hidden_layers + [False]


def test_an_answer_ends_where_its_tokenizer_says(tmp_path, engine):
    """A published folder, loaded without `trust_remote_code`: the engine stops as HuggingFace does."""
    source, model = write_checkpoint(tmp_path / "source", "gva-drope-16")
    end, prompt = SIZE["vocab_size"] - 1, [5, 6, 7]
    answer = made_to_end(model, prompt, end)
    publish(model, source, tmp_path / "model", "a card")
    served = engine(tmp_path / "model", block_size=16)
    wanted = SamplingParams(temperature=0, max_tokens=60, detokenize=False)
    (result,) = served.generate([{"prompt_token_ids": prompt}], wanted, use_tqdm=False)
    assert (list(result.outputs[0].token_ids), result.outputs[0].finish_reason) == (answer, "stop")
