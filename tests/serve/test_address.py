"""Where `gva serve` listens, and what it says of it."""

import os
import subprocess

import pytest
import torch

from gva.cli import main
from gva.serve import versions
from gva.serve.address import address
from gva.serve.flags import Flags
from models import tiny_model


@pytest.mark.parametrize(("flags", "added", "told"), [
    ([], ["--host", "127.0.0.1"], "http://127.0.0.1:8000 for this machine alone, without --api-key: whoever"),
    (["--port", "9"], ["--host", "127.0.0.1"], "http://127.0.0.1:9 for this machine alone"),
    (["--host", "0.0.0.0", "--api-key=k"], [], "//0.0.0.0:8000 for every machine that reaches this one, with the key"),
    (["--host=::1", "--api_key", "k"], [], "http://[::1]:8000 for this machine alone, with the key"),
    (["--host", "localhost", "--host", "10.0.0.1"], [], "http://10.0.0.1:8000 for every machine"),
    (["--ho", "0.0.0.0", "--api-k=k"], [], "//0.0.0.0:8000 for every machine that reaches this one, with the key"),
    (["--headless", "--por=7"], ["--host", "127.0.0.1"], "http://127.0.0.1:7 for this machine alone"),
    (["--uds", "/tmp/socket"], [], "listening on /tmp/socket for this machine alone"),
], ids=str)  # fmt: skip
def test_loopback_unless_told_otherwise(flags, added, told, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert address(Flags.of(flags)).flags == added
    assert told in address(Flags.of(flags)).told


def test_an_empty_address_is_none_and_an_empty_key_too(monkeypatch):
    """vLLM would listen on every address of the machine, and take no key from the environment."""
    monkeypatch.setenv("VLLM_API_KEY", "k")
    for words in (["--host", ""], ["--host="]):
        with pytest.raises(ValueError, match="--host='': names no address"):
            address(Flags.of(words))
    assert "without --api-key: whoever reaches it may use it" in address(Flags.of(["--api-key", ""])).told


def test_what_a_file_of_flags_says_counts(tmp_path, monkeypatch):
    (tmp_path / "flags.yaml").write_text("host: 0.0.0.0\nport: 77\napi-key: k\n")
    flags = ["--config", str(tmp_path / "flags.yaml")]
    assert address(Flags.of(flags)).flags == []
    assert (
        address(Flags.of(flags)).told
        == "listening on http://0.0.0.0:77 for every machine that reaches this one, with the key"
    )
    assert "http://1.2.3.4:77" in address(Flags.of([*flags, "--host", "1.2.3.4"])).told
    (tmp_path / "flags.yaml").write_text("max-model-len: 64\n")
    assert address(Flags.of(flags)).flags == ["--host", "127.0.0.1"]
    monkeypatch.setenv("VLLM_API_KEY", "k")
    assert "with the key" in address(Flags.of(flags)).told


def test_modules_of_the_folder_that_one_stands_in_are_not_run(tmp_path, monkeypatch):
    """A stranger's folder, say. What vLLM starts in its turn has the environment too."""
    tiny_model("gva-drope-16", torch.float32).save_pretrained(tmp_path)
    (tmp_path / "vllm.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda program, words, environment: subprocess.run(words, env=environment))
    monkeypatch.setattr(versions, "installed", lambda: "0.32.0")
    main(["serve", "."])
    assert not (tmp_path / "ran").exists()


def test_the_server_is_started_there(tmp_path, monkeypatch, capsys):
    tiny_model("gva-drope-16", torch.float32).save_pretrained(tmp_path / "run" / "model")
    (tmp_path / "run" / "run.json").write_text("{}")
    started = []
    monkeypatch.setattr(os, "execve", lambda program, words, environment: started.append(words))
    monkeypatch.setattr(versions, "installed", lambda: "0.32.0")
    for place in (tmp_path / "run" / "model", tmp_path / "run"):  # the folder, and the run that left it
        main(["serve", str(place), "--port", "81"])
        assert started[-1][3:] == ["serve", str(tmp_path / "run" / "model"), "--host", "127.0.0.1", "--port", "81"]
    assert (
        "gva serve: listening on http://127.0.0.1:81 for this machine alone, without --api-key"
        in capsys.readouterr().out
    )
