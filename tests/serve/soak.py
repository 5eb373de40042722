"""Mixed load on a server for some minutes, which must leave it as it was: nothing held, no memory lost, no error but
those that were asked for.

    python tests/serve/soak.py                                         a toy on this machine, 3 minutes (make soak)
    python tests/serve/soak.py --model RUN/model --seconds 480 -- --max-model-len 8192
    python tests/serve/soak.py --url http://127.0.0.1:8000 --api-key KEY --seconds 480

Clients send ragged prompts, prompts that begin alike, streams that are read to their end or left in the middle, prompts
longer than the context, and what is no request. The toy's cache is small, so that requests are preempted. What was seen
is printed as one line of JSON, which --out keeps too. Ends with 1 if anything was wrong. Words after -- are for
`gva serve`, such as --speculative-config.
"""

import argparse
import http.client
import json
import os
import random
import shlex
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).parents[1]))

from server import KEY, TOY, Server, held_at_last, metric

COUNTED = (
    "num_preemptions_total",
    "prefix_cache_hits_total",
    "spec_decode_num_drafts_total",
    "generation_tokens_total",
)
SCARCE = f" --kv-cache-memory-bytes {800 << 10}"  # two and a half of the toy's contexts, so that requests are preempted
GROWTH = 0.05  # of the server's memory between the second and the last third, at most


class Load:
    """Clients that ask until the time is over, or one of them was answered as it should not be."""

    def __init__(self, url, key, context, seconds, limit, seed=0):
        self.address, self.key, self.context, self.limit = urlsplit(url).netloc, key, context, limit
        self.until, self.seed = time.monotonic() + seconds, seed
        self.done, self.wrong, self.lock = Counter(), [], threading.Lock()
        self.model = json.loads(self._send("GET", "/v1/models")[1])["data"][0]["id"]
        self.common = [random.Random(seed).randint(5, 90) for _ in range(context // 3)]
        self.kinds = [self.whole, self.whole, self.alike, self.stream, self.hang_up, self.too_long, self.no_request]

    def run(self, clients):
        threads = [threading.Thread(target=self._client, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        return threads

    def _client(self, number):
        draws = random.Random(f"{self.seed} {number}")
        while time.monotonic() < self.until and not self.wrong and sum(self.done.values()) < self.limit:
            kind = draws.choice(self.kinds)
            try:
                told = kind(draws)
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
            with self.lock:
                self.done[kind.__name__] += 1
                if told:
                    self.wrong.append(f"{kind.__name__}: {told}")

    # ---- what is asked; each returns what was wrong with the answer, or nothing ----

    def whole(self, draws, prompt=None):
        prompt = prompt or self._ragged(draws)
        new = draws.randint(1, self.context - len(prompt))
        status, body = self._send("POST", "/v1/completions", self._asking(prompt, new))
        if status != 200:
            return f"{status} {body[:300]!r}"
        told = json.loads(body)["usage"]
        fine = (told["prompt_tokens"], told["completion_tokens"]) == (len(prompt), new)
        return None if fine else f"{len(prompt)} and {new} tokens asked, {told}"

    def alike(self, draws):
        return self.whole(draws, [*self.common, *(draws.randint(5, 90) for _ in range(draws.randint(1, 9)))])

    def stream(self, draws, chunks=None):
        """To its end, or so many chunks of it."""
        prompt = self._ragged(draws)
        new = self.context - len(prompt) if chunks else draws.randint(1, self.context - len(prompt))
        connection = self._open("POST", "/v1/completions", self._asking(prompt, new, stream=True))
        try:
            reply = connection.getresponse()
            if reply.status != 200:
                return f"{reply.status} {reply.read()[:300]!r}"
            lines = (line for line in reply if line.startswith(b"data:"))
            for number, line in enumerate(lines, 1):
                if line.strip() == b"data: [DONE]" or number == chunks:
                    return None
                if "error" in json.loads(line[5:]):
                    return repr(line[:300])
            return "the stream broke off"
        finally:
            connection.close()

    def hang_up(self, draws):
        return self.stream(draws, draws.randint(1, 4))

    def too_long(self, draws):
        return self._refused(self._asking([7] * (self.context + draws.randint(1, 99)), 1))

    def no_request(self, draws):
        fine = self._asking([7], 1)
        bodies = [
            b"{not json",
            {"model": self.model, "prompt": {"no": 1}},
            {**fine, "temperature": -3},
            {**fine, "n": -1},
        ]
        return self._refused(draws.choice(bodies))

    def _refused(self, body):
        status, answer = self._send("POST", "/v1/completions", body)
        return None if status in (400, 422) else f"taken, or refused otherwise: {status} {answer[:300]!r}"

    # ---- how ----

    def _ragged(self, draws):
        length = min(int(draws.expovariate(6 / self.context)) + 1, self.context - 1)
        return [draws.randint(5, 90) for _ in range(length)]

    def _asking(self, prompt, new, **more):
        return {"model": self.model, "prompt": prompt, "max_tokens": new, "ignore_eos": True, **more}

    def _open(self, method, path, body=None):
        connection = http.client.HTTPConnection(self.address, timeout=300)
        content = json.dumps(body) if isinstance(body, dict) else body
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        connection.request(method, path, content, headers)
        return connection

    def _send(self, method, path, body=None):
        connection = self._open(method, path, body)
        try:
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()


def memory(pid):
    """MiB that a process and all that came of it hold, from /proc."""
    parents, sizes = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        except OSError:  # it has ended
            continue
        parents[int(folder.name)] = int(status["PPid"])
        sizes[int(folder.name)] = int(status.get("VmRSS", "0").split()[0]) / 1024
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(sizes.get(one, 0) for one in family)


def soak(url, key, context, seconds, clients, limit, pid=None):
    """What was seen, and the list of what was wrong."""
    before = {name: metric(url, name) for name in COUNTED}
    load, held, started = Load(url, key, context, seconds, limit), [], time.monotonic()
    threads = load.run(clients)
    while any(thread.is_alive() for thread in threads):
        time.sleep(1)
        held += [memory(pid)] if pid else []
    took = time.monotonic() - started
    seen = {"seconds": round(took, 1), "context": context, "clients": clients, "requests": dict(load.done)}
    counts = {name: metric(url, name) - before[name] for name in COUNTED}
    left = held_at_last(url, 60)
    wrong = [*load.wrong, *(f"{name} is {value} at the end" for name, value in left.items() if value)]
    third = len(held) // 3
    if third >= 10:
        middle, last = median(held[third : 2 * third]), median(held[2 * third :])
        seen["memory_mib"] = [round(middle), round(last)]
        wrong += [f"memory grew from {middle:.0f} to {last:.0f} MiB"] if last > middle * (1 + GROWTH) else []
    wrong += [f"never asked: {kind.__name__}" for kind in load.kinds if not load.done[kind.__name__]]
    return {**seen, **counts, **left}, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--requests", type=int, default=100_000, help="at most")
    parser.add_argument("--clients", type=int, default=8, help="that ask at a time")
    parser.add_argument(
        "--context", type=int, help="tokens of the model's context as it is served; by default the toy's"
    )
    parser.add_argument("--model", type=Path, help="a folder to serve; by default a toy")
    parser.add_argument("--url", help="a server that runs already, on this machine")
    parser.add_argument("--api-key", default="", help="of that server")
    parser.add_argument("--out", type=Path, help="a file that the line is added to")
    parser.add_argument("flags", nargs="*", help="for gva serve, after --")
    arguments = parser.parse_args()
    how = {name: getattr(arguments, name) for name in ("seconds", "clients")} | {"limit": arguments.requests}
    if arguments.url:
        seen, wrong = soak(arguments.url, arguments.api_key, arguments.context or 512, **how)
    else:
        seen, wrong = _serve_and_soak(arguments, how)
    line = json.dumps({"ok": not wrong, "wrong": wrong[:5], **seen})
    print(line)
    if arguments.out:
        with arguments.out.open("a") as file:
            file.write(line + "\n")
    return 1 if wrong else 0


def _serve_and_soak(arguments, how):
    from served import CONTEXT, write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        toy = arguments.model is None
        model = arguments.model or write_checkpoint(Path(folder) / "toy", "gva-drope-16")[0]
        server = Server(
            model, Path(folder) / "log.txt", (TOY + SCARCE if toy else "") + " " + shlex.join(arguments.flags)
        )
        try:
            server.wait()
            seen, wrong = soak(server.url, KEY, arguments.context or CONTEXT, **how, pid=server.process.pid)
            log = server.log.read_text(errors="replace")
            wrong += ["the server has ended"] if server.process.poll() is not None else []
            wrong += (
                [f"a traceback in the server's log: {log[log.index('Traceback') :][:2000]}"]
                if "Traceback" in log
                else []
            )
        finally:
            server.process.terminate()
            server.process.wait(60)
    if toy:
        needed = ("num_preemptions_total", "prefix_cache_hits_total")
        wrong += [f"{name}: none, so it was not tried" for name in needed if not seen[name]]
    return seen, wrong


if __name__ == "__main__":
    # As the tests have it: a process of its own for the engine, nothing written outside the checkout.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(__file__).parents[2] / ".venv-serve" / "cache"))
    sys.exit(main())
