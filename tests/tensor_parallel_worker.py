"""One rank of tests/test_tensor_parallel.py: loads a checkpoint sharded, compares with the logits of one device."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import DynamicCache, StaticCache

from gva import GvaForCausalLM


@torch.no_grad()
def main(folder: str) -> None:
    expected = torch.load(f"{folder}/expected.pt")
    model = GvaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float64).eval()
    ids, scalars = expected["ids"], expected["scalars"]
    heads = model.model.layers[0].self_attn.q_proj.weight
    local = heads.to_local() if hasattr(heads, "to_local") else heads
    assert local.shape[0] == model.config.num_attention_heads * model.config.score_dim // 2, "heads are not sharded"
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)):
        logits = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 7), (7, 8), (8, 9))]
        logits = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in logits]
        error = (torch.cat(logits, 1) - expected["logits"]).abs().max().item()
        assert error < 1e-10, f"{type(cache).__name__}: {error}"
        layer = cache.layers[0]
        held = (layer.keys.numel() + layer.values.numel()) / (layer.keys.shape[0] * layer.keys.shape[2])
        assert held == scalars, f"a rank caches {held} scalars per token and layer, not {scalars}"
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(tokens, expected["tokens"]), "generated tokens differ"
    # Said in a file: how the process group comes down afterwards is not what is tested.
    Path(folder, f"equal-{dist.get_rank()}").touch()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
