"""What is drawn from: transformers' own filters. How: one number of a sequence's own per token."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from gva.paged.sampling import Sampler, uniform


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [None, 1, 7, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-9])
def test_the_filters_are_those_of_transformers(temperature, top_k, top_p):
    logits = torch.randn(16, 300)
    logits[:, ::7] = logits[:, 1::7]  # equals stay together
    want = TemperatureLogitsWarper(temperature)(None, logits)
    want = want if top_k is None else TopKLogitsWarper(top_k)(None, want)
    want = want if top_p == 1 else TopPLogitsWarper(top_p)(None, want)
    assert torch.equal(Sampler(temperature, top_k, top_p).filtered(logits), want)


def test_tokens_come_as_often_as_their_probability_says():
    sampler, rows = Sampler(0.8, 5, 0.95, seed=11), 20_000
    logits = torch.tensor([[1.0, -2.0, 0.5, 3.0, 0.0, 2.5, -torch.inf, 1.5]]).expand(rows, -1)
    probabilities = sampler.filtered(logits[:1]).softmax(-1)[0].double()
    keys = sampler.keys(list(range(rows)))
    drawn = sampler.choose(logits, keys, torch.full((rows,), 9)).bincount(minlength=8) / rows
    spread = (probabilities * (1 - probabilities) / rows).sqrt()
    assert ((drawn - probabilities).abs() <= 4 * spread).all()
    assert (drawn[probabilities == 0] == 0).all()


def test_numbers_of_neighbours_and_of_steps_have_nothing_to_do_with_one_another():
    keys, lengths = Sampler(1.0, seed=1).keys(list(range(200))), torch.arange(200, dtype=torch.int32)
    numbers = torch.stack([uniform(keys, lengths[n].expand(200)) for n in range(200)])
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert abs(numbers.mean() - 0.5) < 0.01
    assert abs(numbers.var() - 1 / 12) < 0.01
    for a, b in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1]), (numbers, numbers.T)):
        assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 0.02 or a is numbers
    assert len(numbers.unique()) > 39_990, "32 bits of 40,000 numbers"
    other = uniform(Sampler(1.0, seed=2).keys(list(range(200))), lengths)
    assert not (other == uniform(keys, lengths)).any()


def test_no_number_is_read_back_from_the_device():
    """Tensors without values would refuse it; so a CUDA graph can hold the choice."""
    with torch.device("meta"):
        sampler = Sampler(1.0, 7, 0.9)
        keys, lengths = sampler.keys([0, 1, 2], "meta"), torch.zeros(3, dtype=torch.int32)
        assert sampler.choose(torch.zeros(3, 50), keys, lengths).shape == (3,)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: must not be negative"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0: must be positive"),
        ({"temperature": 1.0, "top_p": 0.0}, r"top_p=0.0: must lie in \(0, 1\]"),
        ({"temperature": 1.0, "seed": -1}, "seed=-1: must not be negative"),
        ({"top_p": 0.5}, "top_p=0.5: the likeliest token is taken whatever it is; give a temperature"),
    ],
)
def test_what_cannot_be_drawn_from_is_refused(options, why):
    with pytest.raises(ValueError, match=why):
        Sampler(**options)
