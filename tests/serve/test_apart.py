"""Engines that need a process, or several, of their own: two ranks, speculation, another vLLM."""

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-serve")

from served import check_greedy, ragged_prompts, run_apart

from gva import cost

TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # vLLM wants a set of cores for each


@pytest.mark.parametrize("variant", ["gva-drope-16", "mla"])
def test_ngram_speculation(checkpoints, variant):
    """Several tokens of a request are verified at once; requests differ in how many."""
    folder, model = checkpoints(variant)
    ngrams = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    prompts = ragged_prompts((1, 20, 70, 200))
    result = run_apart(folder, prompts, new=60, block_size=16, speculative_config=ngrams)
    check_greedy(model, prompts, result["answers"])
    accepted, drafted = (result["counters"][f"vllm:spec_decode_num_{x}_tokens"] for x in ("accepted", "draft"))
    assert 0 < accepted < drafted


def test_compiled(checkpoints):
    """As engines start by default: the model goes through torch.compile, our ops stay outside."""
    folder, model = checkpoints("gva-drope-16")
    prompts = ragged_prompts()
    result = run_apart(folder, prompts, block_size=16, enforce_eager=False)
    check_greedy(model, prompts, result["answers"])


@pytest.mark.parametrize(
    ("variant", "groups", "scalars"),
    [("gva-drope-16", 2, 32 + 16), ("gva-drope-16", 1, 32 + 16), ("mla", 2, 64 + 16), ("gqa", 2, 2 * 32)],
)
def test_two_ranks(checkpoints, variant, groups, scalars):
    """Groups are split, k_rope is on both; with one group for two ranks the group is on both, too."""
    folder, model = checkpoints(variant, num_value_groups=groups)
    prompts = ragged_prompts((1, 17, 200))
    result = run_apart(folder, prompts, environment=TWO_RANKS, block_size=32, tensor_parallel_size=2)
    check_greedy(model, prompts, result["answers"])
    assert result["bytes_per_token"] == model.config.num_hidden_layers * scalars * 4  # of a rank


def test_the_oldest_of_the_newer_vllms(checkpoints):
    """The same, compiled, on 0.29, unpacked beside 0.32 (see the Makefile)."""
    other = Path(os.environ.get("GVA_VLLM_OLDEST", Path(__file__).parents[2] / ".venv-serve" / "vllm-0.29"))
    if not (other / "vllm").is_dir():
        pytest.skip(f"{other}: no vLLM there; make test-serve unpacks one")
    folder, model = checkpoints("gva-drope-16")
    prompts = ragged_prompts()
    result = run_apart(
        folder,
        prompts,
        environment={"PYTHONPATH": str(other)},
        block_size=16,
        max_num_batched_tokens=64,
        enable_chunked_prefill=True,
        enforce_eager=False,
    )
    assert result["vllm"].startswith("0.29")
    check_greedy(model, prompts, result["answers"])
    assert result["bytes_per_token"] == cost.cache_bytes_per_token(model.config, "float32")
