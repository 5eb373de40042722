"""The soak sees what is wrong: against a server that answers as vLLM does, and others. For minutes, and against
vLLM itself, it is `make soak`."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from soak import COUNTED, soak

CONTEXT = 32


class Answers(BaseHTTPRequestHandler):
    fault = None

    def do_GET(self):
        if self.path == "/v1/models":
            return self._say(200, json.dumps({"data": [{"id": "toy"}]}))
        names = {**dict.fromkeys(COUNTED, 1), "num_requests_running": 0, "kv_cache_usage_perc": 0}
        return self._say(200, "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in names.items()))

    def do_POST(self):
        try:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            prompt, new = list(asked["prompt"]), asked["max_tokens"]
            if len(prompt) + new > CONTEXT or asked.get("temperature", 0) < 0 or asked.get("n", 1) < 1:
                raise ValueError
        except (ValueError, KeyError):
            return self._say(200 if self.fault == "takes all" else 400, "{}")
        if asked.get("stream"):
            ends = "" if self.fault == "breaks off" else "data: [DONE]\n\n"
            return self._say(200, 'data: {"choices": []}\n\n' * 5 + ends)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": new - (self.fault == "short")}
        return self._say(500 if self.fault == "fails" else 200, json.dumps({"usage": usage}))

    def _say(self, status, content):
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *words):
        pass


@pytest.mark.parametrize("fault", [None, "takes all", "breaks off", "short", "fails"])
def test_what_is_wrong_is_told(fault):
    handler = type("Faulty", (Answers,), {"fault": fault})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        seen, wrong = soak(url, "", CONTEXT, seconds=60, clients=3, limit=200)
        server.shutdown()
    told = {
        "takes all": "taken, or refused otherwise: 200",
        "breaks off": "broke off",
        "short": "tokens asked",
        "fails": "500",
    }
    assert any(told[fault] in line for line in wrong) if fault else wrong == []
    assert fault or sum(seen["requests"].values()) >= 200
    assert not seen["num_requests_running"]
