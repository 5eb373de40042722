"""Toy checkpoints to serve, and the judgement whether served tokens are those of the HuggingFace model."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers import decoders as tokenizer_decoders
from transformers import PreTrainedTokenizerFast

from models import SIZE, tiny_model

CONTEXT = 512
LETTERS = [chr(code) for code in range(32, 127)]
NEW = 24


def write_checkpoint(folder, variant, **overrides):
    """A folder that vLLM can serve, with a tokenizer of one token per letter, and its float32 HuggingFace model."""
    model = tiny_model(variant, torch.float32, **{"max_position_embeddings": CONTEXT, **overrides})
    model.save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate(["<pad>", *LETTERS, "<unk>", "<end>"])}
    assert len(vocabulary) == SIZE["vocab_size"]
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = tokenizer_decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>").save_pretrained(folder)
    return folder, model


def ragged_prompts(lengths=(1, 2, 15, 16, 17, 33, 129, 300)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, SIZE["vocab_size"] - 2, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def check_greedy(model, prompts, answers):
    """Every answered token is the likeliest after all tokens before it, in the HuggingFace model without a cache.

    One that is not passes only where float64 puts it so close to the likeliest that float32 cannot tell them apart: the
    error of HuggingFace's own float32 logits against float64 is measured on the same tokens, and an engine may have
    twice that and two units of rounding, for each of the two logits.
    """
    exact = copy.deepcopy(model).double()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) > 0
        ids = torch.tensor([prompt + list(answer)])
        at = slice(len(prompt) - 1, ids.shape[1] - 1)
        logits, truth = model(ids).logits[0, at].double(), exact(ids).logits[0, at]
        eager = (logits - truth).abs().amax(-1)
        allowed = 2 * (2 * eager + 2 * torch.finfo(torch.float32).eps * truth.abs().amax(-1))
        behind = truth.amax(-1) - truth.gather(1, torch.tensor(answer)[:, None])[:, 0]
        wrong = (logits.argmax(-1) != torch.tensor(answer)) & (behind > allowed)
        first = int(wrong.int().argmax())
        assert not wrong.any(), (
            f"prompt of {len(prompt)}: token {first} of the answer is {answer[first]}, HuggingFace has "
            f"{int(truth[first].argmax())}, which is {behind[first]:.3g} likelier; allowed {allowed[first]:.3g}"
        )


def start(folder, **options):
    """An engine in this process, with little memory and without compilation."""
    from vllm import LLM

    small = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": CONTEXT,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 16 << 20,
        "gpu_memory_utilization": 0.1,
        "disable_log_stats": False,
    }
    return LLM(model=str(folder), **{**small, **options})


def greedy(engine, prompts, new=NEW):
    """The answers, and how many tokens of each prompt were found in the cache."""
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    results = engine.generate([{"prompt_token_ids": p} for p in prompts], wanted, use_tqdm=False)
    return [list(r.outputs[0].token_ids) for r in results], [r.num_cached_tokens for r in results]


def counters(engine):
    """What vLLM counts, by name."""
    return {m.name: getattr(m, "value", None) for m in engine.get_metrics()}


def scheduler(engine):
    return engine.llm_engine.engine_core.engine_core.scheduler


def free_pages(engine):
    return scheduler(engine).kv_cache_manager.block_pool.get_num_free_blocks()


def bytes_per_token(engine):
    """What vLLM allocated, over the tokens that fit into it."""
    config = scheduler(engine).kv_cache_config
    (group,) = config.kv_cache_groups
    page_bytes = sum(group.kv_cache_spec.page_size_bytes for _ in group.layer_names)
    allocated = sum(tensor.size for tensor in config.kv_cache_tensors)
    assert allocated == page_bytes * config.num_blocks
    return allocated / (config.num_blocks * group.kv_cache_spec.block_size)


def run_apart(folder, prompts, new=NEW, environment=None, **options):
    """The same in a process of its own: what `engine_worker.py` writes."""
    job, out = Path(folder) / "job.json", Path(folder) / "out.json"
    out.unlink(missing_ok=True)
    job.write_text(json.dumps({"folder": str(folder), "options": options, "prompts": prompts, "new": new}))
    worker = Path(__file__).with_name("engine_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), str(job), str(out)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, **(environment or {})},
    )
    assert out.exists(), f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
    result = json.loads(out.read_text())
    assert result["pages_held"] == 0
    return result
