import pytest
import torch
from transformers.utils import logging

logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
