"""A sample of `make faults`: commands ended at some of their file operations, once or twice, and run again."""

import random

import pytest

from faults.injector import FULL, KILL, Injector
from faults.jobs import ARCHIVE, COMPARE, TRAIN, Trial, spread, write_inputs


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("faults")
    with Injector(scratch) as injector:
        yield injector, write_inputs(injector, scratch / "inputs")


@pytest.mark.parametrize(("job", "kills"), [(TRAIN, 3), (COMPARE, 1), (ARCHIVE, 3)], ids=str)
def test_nothing_is_lost(made, tmp_path, job, kills):
    injector, inputs = made
    trial, rng = Trial(injector, job, inputs, tmp_path), random.Random(0)
    every = spread(trial.operations, 2 * trial.operations)
    for at, half in rng.sample(every, kills):
        assert not trial.fails_at(at, half, KILL, then=rng.randint(1, trial.operations))
    assert not trial.fails_at(trial.operations // 2, False, FULL)
