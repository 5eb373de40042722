"""Two gloo ranks: heads and groups sharded, the positional key and the latent replicated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gva import GvaForCausalLM
from models import tiny_model, tokens

pytestmark = pytest.mark.hf
PER_RANK = {"gqa": 2 * 32, "mla": 64 + 16, "gva-drope-16": 32 + 16, "gva-variance-fixed": 32, "gta": 32 + 16}


@pytest.mark.parametrize("variant", PER_RANK)
def test_two_ranks_equal_one_device(tmp_path, variant):
    model, ids = tiny_model(variant), tokens(2, 9)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = {
            "ids": ids,
            "logits": model(ids).logits,
            "tokens": model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0),
            "scalars": PER_RANK[variant],
        }
    torch.save(expected, tmp_path / "expected.pt")
    worker = Path(__file__).with_name("tensor_parallel_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(worker)]
    run = subprocess.run(
        [*command, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert all((tmp_path / f"equal-{rank}").exists() for rank in range(2)), run.stderr[-3000:]


def test_groups_that_cannot_be_split_are_refused(tmp_path, monkeypatch):
    tiny_model("mqa").save_pretrained(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"num_value_groups=1: cannot be split over 2 tensor-parallel ranks"):
        GvaForCausalLM.from_pretrained(tmp_path, tp_plan="auto")
