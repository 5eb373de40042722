"""A sample of `make faults`: what is killed, or runs out of disk, ends as if it had not when it runs again."""

import random

import pytest

from faults.injector import FULL, Injector
from faults.jobs import JOBS, PREPARE, Trial, must, spread, tree, write_inputs

MANY, FEW = 8, 2  # tries: a preparation takes a blink, training does not


@pytest.fixture(scope="module")
def injector(tmp_path_factory):
    with Injector(tmp_path_factory.mktemp("injector")) as started:
        yield started


@pytest.fixture(scope="module")
def inputs(injector, tmp_path_factory):
    return write_inputs(injector, tmp_path_factory.mktemp("inputs") / "inputs")


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name.replace(" ", "-"))
def test_nothing_is_lost(job, injector, inputs, tmp_path):
    trial = Trial(injector, job, inputs, tmp_path)
    tries, rng = MANY if job.name.startswith("prepare") else FEW, random.Random(1)
    for number, (at, half) in enumerate(spread(trial.operations, tries)):
        then = rng.randint(1, trial.operations) if number % 3 == 0 else 0
        assert trial.fails_at(at, half, then=then) == "", f"killed at operation {at}, then at {then}"
    for at, half in spread(trial.operations, tries // 2):
        assert trial.fails_at(at, half, FULL) == "", f"a disk that is full from operation {at} on"


def test_inputs_that_change_and_change_back_leave_what_they_would_have(injector, inputs, tmp_path):
    """Killed, then run with another file, killed again, then with the first: never an index of one over the tokens of
    the other."""
    other = tmp_path / "other"
    other.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (other / name).write_bytes((inputs / "b.jsonl").read_bytes())
    whole = {}
    for place in (inputs, other):
        folder = tmp_path / f"whole-{place.name}"
        operations = must(injector.run(PREPARE.words(folder, place), folder)).operations
        whole[place] = tree(folder)
    for at, half in spread(operations, MANY):
        folder = tmp_path / f"try-{at}-{half}"
        injector.run(PREPARE.words(folder, inputs), folder, at, half)
        injector.run(PREPARE.words(folder, other), folder, operations // 2)
        ended = injector.run(PREPARE.words(folder, inputs), folder)
        if ended.code:  # killed before it could say what it was of, and the other was first
            assert "is prepared from something else, which differs in inputs.train-00000" in ended.said
            must(injector.run(PREPARE.words(folder, other), folder))
        assert tree(folder) == whole[other if ended.code else inputs]
