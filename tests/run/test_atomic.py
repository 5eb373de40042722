"""What is written appears whole or not at all."""

import os

import pytest

from gva.run.atomic import staging_folder, write_atomically


def test_a_file_torn_by_a_kill_is_the_one_before(tmp_path, monkeypatch):
    write_atomically(tmp_path / "a.json", "old")

    def killed(source, target):
        assert source.read_text() == "new", "it is whole before it takes the place of the other"
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == "old"
    monkeypatch.undo()
    write_atomically(tmp_path / "a.json", b"new")
    assert (tmp_path / "a.json").read_bytes() == b"new"


def test_what_a_killed_writer_left_goes_and_two_that_write_at_once_share_nothing(tmp_path, monkeypatch):
    (tmp_path / ".a.json.0.tmp").write_text("hal")
    real, seen = os.replace, []

    def replace(source, target):
        seen.append(source.name)
        if len(seen) == 1:  # another writer comes just then
            write_atomically(target, "theirs")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    write_atomically(tmp_path / "a.json", "ours")
    assert seen == [".a.json.0.tmp", ".a.json.1.tmp"]
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "ours")]


def test_a_staging_folder_is_gone_afterwards_and_so_is_one_left_by_a_kill(tmp_path):
    (tmp_path / ".saving-left").mkdir()
    with staging_folder(tmp_path) as staging:
        assert list(tmp_path.iterdir()) == [staging]
    assert not list(tmp_path.iterdir())
    with pytest.raises(ZeroDivisionError), staging_folder(tmp_path / "new"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir()), "a folder made for nothing is gone too"
