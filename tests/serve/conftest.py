import os
from pathlib import Path

import pytest
import torch

# Read when vLLM is first imported: one process, so that a test sees the scheduler; nothing written outside the tests.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(__file__).parents[2] / ".venv-serve" / "cache"))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """checkpoints(variant, **overrides): a folder with weights and a tokenizer, and the HuggingFace model of it."""
    from served import write_checkpoint

    made = {}

    def checkpoint(variant, **overrides):
        key = variant, repr(sorted(overrides.items()))
        if key not in made:
            torch.manual_seed(0)
            made[key] = write_checkpoint(tmp_path_factory.mktemp(variant), variant, **overrides)
        return made[key]

    return checkpoint
