import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from gva.data.prepare import prepare_standard_library
from gva.data.shards import TokenDataset
from gva.train import loop
from gva.train.recipe import build
from task_rows import write_files

SIZE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "value_head_dim": 32, "max_position_embeddings": 128, "length": 64, "global_batch": 16, "micro_batch": 8,
    "eval_every": 20, "eval_sequences": 8, "checkpoint_every": 20, "keep_checkpoints": 9, "lr": 0.01,
}  # fmt: skip


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """The embedded default, prepared once, with a vocabulary that does not cut English to letters."""
    folder = tmp_path_factory.mktemp("text")
    prepare_standard_library(folder, vocab_size=2048, progress=False)
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory, text):
    """A run of forty steps, with its checkpoints of steps 20 and 40."""
    out = tmp_path_factory.mktemp("trained") / "run"
    config, recipe = build("demo", "gva-drope-16", {**SIZE, "steps": 40}, TokenDataset(text).vocab_size)
    loop.train(config, recipe, text, out, device="cpu", progress=False)
    return out


@pytest.fixture(scope="session")
def tokenizer(text):
    return AutoTokenizer.from_pretrained(text / "tokenizer")


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The handwritten rows, a file for each task."""
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="session")
def bench():
    """The real evaluation splits, which the project does not ship."""
    folder = Path(os.environ.get("GVA_BENCH", Path(__file__).parents[3] / "shared" / "data" / "bench"))
    if not folder.is_dir():
        pytest.skip("no benchmark files; point GVA_BENCH at a folder with hellaswag_val.jsonl and the others")
    return folder
