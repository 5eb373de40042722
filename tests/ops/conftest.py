"""Memory that nobody wrote shows itself. (Without a GPU, tests/conftest.py has chosen Triton's interpreter.)"""

import pytest
import torch


@pytest.fixture(autouse=True)
def empty_is_nan(request, monkeypatch):
    """What `torch.empty` returns is NaN, so that an element that nobody writes is seen. Not where torch.compile traces:
    it knows the function that we would replace."""
    if request.node.get_closest_marker("compiles"):
        return
    plain = torch.empty

    def empty(*args, **kwargs):
        tensor = plain(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", empty)
