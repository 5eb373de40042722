import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may wait for a network

import pytest
import torch
from transformers.utils import logging

logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
