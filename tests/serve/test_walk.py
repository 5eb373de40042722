"""The end of docs/engineer.md: a model of one's own text behind a server, and a talk with it."""

import io
import shlex

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-serve")

from server import Server, free_port

from gva.cli import main
from walk import Walk


def test_an_engineers_server(tmp_path, monkeypatch, capfd):
    walk = Walk("engineer.md", tmp_path, monkeypatch, capfd)
    while "gva train" not in walk.blocks[0][1]:
        walk.blocks.pop(0)  # what needs no vLLM is in tests/walks
    walk.take("cat README.md docs/*.md > corpus.txt\ngva train")
    walk.next("from transformers")
    serve, port = walk.next("gva serve"), str(free_port())
    chat = walk.next("gva chat")
    assert "--port 8000" in serve
    assert ":8000" in chat
    server = Server.typed(serve.replace("8000", port), port, tmp_path / "log.txt")
    try:
        server.wait()
        monkeypatch.setattr("sys.stdin", io.StringIO("A cache\n"))
        assert main(shlex.split(chat.replace("8000", port))[1:]) == 0
        assert "this model has no chat template: it continues the text" in capfd.readouterr().out
        server.wait_until_empty()
    finally:
        server.process.terminate()
        server.process.wait(60)
    assert f"gva serve: listening on http://127.0.0.1:{port} for this machine alone" in server.log.read_text()
