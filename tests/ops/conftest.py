"""Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def empty_is_nan(monkeypatch):
    """What `torch.empty` returns is NaN, so that an element that nobody writes is seen."""
    plain = torch.empty

    def empty(*args, **kwargs):
        tensor = plain(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", empty)
