"""What `gva chat` sends, and what of a server reaches the terminal."""

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("openai", reason="needs the extra serve")

from gva.cli import main

HOSTILE = "\x1b]0;owned\x07\x1b[2Jhello\r"


class Server(BaseHTTPRequestHandler):
    heard: list[dict[str, str]]

    def _answer(self, kind: str, content: str, code: int = 200) -> None:
        self.heard.append({name.lower(): value for name, value in self.headers.items()})
        self.send_response(code)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(content.encode())

    def do_GET(self) -> None:
        self._answer(
            "application/json", json.dumps({"object": "list", "data": [{"id": f"toy{HOSTILE}", "object": "model"}]})
        )

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if asked["messages"][-1]["content"] == "break":
            self._answer("application/json", json.dumps({"error": {"message": HOSTILE}}), 500)
            return
        chunk = {"id": "1", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": HOSTILE}}]}
        self._answer("text/event-stream", f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server():
    Server.heard = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


@pytest.fixture(autouse=True)
def secrets(monkeypatch):
    named = {"API_KEY": "sk-secret", "ORG_ID": "org-secret", "PROJECT_ID": "proj-secret", "ADMIN_KEY": "admin-secret"}
    for name, value in (named | {"CUSTOM_HEADERS": "X-Mine: header-secret"}).items():
        monkeypatch.setenv(f"OPENAI_{name}", value)


def chat(server, monkeypatch, *words, said="hi\n"):
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    return main(["chat", server, *words])


def test_nothing_that_is_meant_for_another_server_is_sent(server, monkeypatch):
    assert chat(server, monkeypatch) == 0
    assert len(Server.heard) == 2
    assert not [value for headers in Server.heard for value in headers.values() if "secret" in value]


@pytest.mark.parametrize("words", [["--api-key", "sk-this"], ["--api-key-from", "MINE"]])
def test_a_key_is_sent_where_it_is_given_for_this_server(server, monkeypatch, words):
    monkeypatch.setenv("MINE", "sk-this")
    assert chat(server, monkeypatch, *words) == 0
    assert [headers["authorization"] for headers in Server.heard] == ["Bearer sk-this"] * 2


def test_a_variable_that_is_not_there_is_told(server, monkeypatch, capsys):
    assert chat(server, monkeypatch, "--api-key-from", "NOWHERE") == 2
    assert "--api-key-from='NOWHERE': no such environment variable" in capsys.readouterr().err
    assert not Server.heard


def test_no_command_to_the_terminal_comes_through(server, monkeypatch, capsys):
    assert chat(server, monkeypatch, said="hi\nbreak\n") == 0
    shown = capsys.readouterr()
    assert "hello" in shown.out
    assert "\\x1b[2J" in shown.out
    assert "\\x1b" in shown.err
    assert not set("\x1b\x07\r") & set(shown.out + shown.err)
