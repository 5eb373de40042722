"""Calls below a roomy frame map no memory, however deep it lies itself."""

import resource

import pytest

from gva.serve.roomy import roomy

CALLS, DEEPEST, BELOW = 300, 320, 60


def faults(depth):
    """Page faults of CALLS calls, `depth` calls below this one."""
    if depth:
        return faults(depth - 1)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(CALLS):
        leaf(1, 2, 3)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def leaf(a, b, c):
    return a


def at(depth, function, *arguments):
    return function(*arguments) if depth == 0 else at(depth - 1, function, *arguments)


def test_no_depth_is_unlucky():
    if max(faults(depth) for depth in range(DEEPEST)) < CALLS:
        pytest.skip("this interpreter does not unmap its stack at every return")
    for depth in range(0, DEEPEST, 5):
        assert max(at(depth, roomy, faults, below) for below in range(BELOW)) < CALLS // 2
