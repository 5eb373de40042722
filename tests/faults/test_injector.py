"""The injector itself: operations are counted, the chosen one is not done or done by half, and nothing outlives it."""

import pytest

from faults.injector import FULL, Injector


@pytest.fixture(scope="module")
def injector(tmp_path_factory):
    with Injector(tmp_path_factory.mktemp("injector")) as started:
        yield started


def draw(folder):
    return ["figures", "scale", "--out", str(folder)]


def test_a_kill_leaves_what_was_done_before_it(injector, tmp_path):
    whole = injector.run(draw(tmp_path / "whole"), tmp_path / "whole")
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert whole.code == 0
    assert whole.operations >= 1 + 2 * len(names), "the folder, and for each file its making and its writing"
    for at in range(1, whole.operations + 1):
        folder = tmp_path / str(at)
        killed = injector.run(draw(folder), folder, at)
        assert (killed.code, killed.operations) == (-9, at)
        assert len(list(folder.glob("[!.]*"))) < len(names), "the last operation is what gives the last file its name"


def test_a_write_is_done_by_half(injector, tmp_path):
    injector.run(draw(tmp_path / "whole"), tmp_path / "whole")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "whole").iterdir()}
    killed = injector.run(draw(tmp_path / "torn"), tmp_path / "torn", at=4, half=True)
    assert killed.code == -9
    (torn,) = (tmp_path / "torn").iterdir()
    assert torn.stat().st_size == sizes[torn.name.removeprefix(".").removesuffix(".0.tmp")] // 2


def test_a_full_disk_refuses_and_the_command_says_so(injector, tmp_path):
    full = injector.run(draw(tmp_path), tmp_path, at=2, mode=FULL)
    assert full.code == 2
    assert "No space left on device" in full.said
