"""Nothing leads out of a folder: not a name in it, not a link in the place of a file that is written."""

from pathlib import Path

import pytest

from gva.run.atomic import sweep, write_atomically
from gva.run.files import FolderError, emptied, inside, opened, read_object, remove, subfolder
from gva.run.folder import locked


@pytest.fixture
def victim(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "file"
    file.write_text("precious")
    return file


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "..", ".", "", "a\x00b", "a\nb", "a\\b", 3, None, "x" * 300])
def test_a_name_that_is_a_path_is_refused(folder, name):
    with pytest.raises(FolderError, match="is not the name of a file"):
        inside(folder, name)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", ".lock", "gva+maps x 2", "größer", "..a"])
def test_a_plain_name_is_taken(folder, name):
    assert inside(folder, name) == folder / name


def test_writing_replaces_a_link(folder, victim):
    (folder / "a").symlink_to(victim)
    write_atomically(folder / "a", "new")
    assert (folder / "a").read_text() == "new"
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("place", [Path.symlink_to, Path.hardlink_to])
def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(folder, victim, place):
    place(folder / ".a.0.tmp", victim)
    write_atomically(folder / "a", "new")
    assert victim.read_text() == "precious"
    assert (folder / "a").read_text() == "new"


def test_what_a_killed_writer_left_is_swept_and_a_failed_one_leaves_nothing(folder, monkeypatch):
    (folder / ".a.7.tmp").write_text("half")
    sweep(folder)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(folder / "a", "new")
    assert not list(folder.iterdir())


@pytest.mark.parametrize("mode", ["w", "a", "x", "ab"])
def test_a_file_is_not_opened_through_a_link(folder, victim, mode):
    (folder / "a").symlink_to(victim)
    with pytest.raises(FolderError, match="a link, and what it leads to would be written over; remove it"):
        opened(folder / "a", mode)
    assert victim.read_text() == "precious"


def test_a_lock_is_no_way_out_either(folder, victim):
    (folder / ".lock").symlink_to(victim)
    with pytest.raises(FolderError, match="a link"), locked(folder):
        pass
    assert victim.read_text() == "precious"


def test_a_folder_that_leads_away_is_not_written_into(folder, victim):
    (folder / "report").symlink_to(victim.parent)
    with pytest.raises(FolderError, match=r"a link to .*elsewhere, outside of the folder"):
        subfolder(folder, "report")
    assert emptied(folder, "report").is_dir()
    assert not (folder / "report").is_symlink()
    assert victim.read_text() == "precious", "the link went, not what it led to"
    (folder / "in").mkdir()
    (folder / "alias").symlink_to(folder / "in")
    assert subfolder(folder, "alias").is_dir(), "a link that stays inside is the owner's business"


def test_removing_takes_a_link_and_leaves_what_it_leads_to(folder, victim):
    (folder / "a").symlink_to(victim.parent)
    remove(folder / "a")
    remove(folder / "a")
    assert not list(folder.iterdir())
    assert victim.read_text() == "precious"


@pytest.mark.parametrize(("content", "told"), [("{", "not JSON"), ("[1]", "holds a list"), ("[" * 10**5, "not JSON")])
def test_a_record_that_is_no_object_says_where_and_what_to_do(folder, content, told):
    (folder / "a.json").write_text(content)
    with pytest.raises(FolderError, match=rf"a\.json: .*{told}.*; copy it again"):
        read_object(folder / "a.json", "copy it again")
