import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may wait for a network
# Of this checkout alone: what a killed process left half-written in the common cache crashes whoever loads it.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "inductor"))

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported, which transformers may do

from transformers.utils import logging

logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
