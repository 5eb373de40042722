"""A sample of `make faults`: commands ended at some of their file operations, once or twice, and run again."""

import random

import pytest

from faults.injector import FULL, KILL, Injector
from faults.jobs import AGAIN, ARCHIVE, COMPARE, MEND, PREPARE, TEXT, TRAIN, Trial, must, spread, tree, write_inputs


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("faults")
    with Injector(scratch) as injector:
        yield injector, write_inputs(injector, scratch / "inputs")


@pytest.mark.parametrize(
    ("job", "kills"), [(PREPARE, 4), (AGAIN, 1), (MEND, 3), (TEXT, 3), (TRAIN, 3), (COMPARE, 1), (ARCHIVE, 3)], ids=str
)
def test_nothing_is_lost(made, tmp_path, job, kills):
    injector, inputs = made
    trial, rng = Trial(injector, job, inputs, tmp_path), random.Random(0)
    every = spread(trial.operations, 2 * trial.operations)
    for at, half in rng.sample(every, kills):
        assert not trial.fails_at(at, half, KILL, then=rng.randint(1, trial.operations))
    assert not trial.fails_at(trial.operations // 2, False, FULL)


def test_inputs_that_change_and_change_back_leave_what_they_would_have(made, tmp_path):
    """Killed, then run with another file, killed again, then with the first: never an index of one over the tokens of
    the other."""
    injector, inputs = made
    other = tmp_path / "other"
    other.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (other / name).write_bytes((inputs / "b.jsonl").read_bytes())
    whole = {}
    for place in (inputs, other):
        folder = tmp_path / f"whole-{place.name}"
        operations = must(injector.run(PREPARE.words(folder, place), folder)).operations
        whole[place] = tree(folder)
    for at, half in spread(operations, 6):
        folder = tmp_path / f"try-{at}-{half}"
        injector.run(PREPARE.words(folder, inputs), folder, at, half)
        injector.run(PREPARE.words(folder, other), folder, operations // 2)
        ended = injector.run(PREPARE.words(folder, inputs), folder)
        if ended.code:  # killed before it could say what it was of, and the other was first
            assert "is prepared from something else, which differs in inputs.train-00000" in ended.said
            must(injector.run(PREPARE.words(folder, other), folder))
        assert tree(folder) == whole[other if ended.code else inputs]
