"""A real server to ask, and what it counts."""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request

from served import CONTEXT

KEY = "a-secret"
TOY = f"--dtype float32 --max-model-len {CONTEXT} --enforce-eager --block-size 16 --kv-cache-memory-bytes {8 << 20}"
TOY += " --gpu-memory-utilization 0.1"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`gva serve` on this machine alone, with these flags of vLLM's."""

    def __init__(self, folder, log, flags=TOY):
        port = free_port()
        usual = f"--host 127.0.0.1 --port {port} --api-key {KEY} --served-model-name toy --generation-config vllm"
        self._start(["serve", str(folder), *usual.split(), *shlex.split(flags)], port, log)

    @classmethod
    def typed(cls, command, port, log):
        """By a whole line, as somebody types it."""
        server = cls.__new__(cls)
        server._start(shlex.split(command)[1:], port, log)
        return server

    def _start(self, words, port, log):
        self.log, self.url = log, f"http://127.0.0.1:{port}"
        environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gva.cli", *words],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env=environment,
        )

    def wait(self, seconds=300):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return self
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"the server did not start in {seconds} s: {self.log.read_text()[-4000:]}")

    def metric(self, name):
        return metric(self.url, name)

    def wait_until_empty(self):
        held = held_at_last(self.url)
        assert not any(held.values()), held


def metric(url, name):
    """What vLLM counts under this name."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
    return sum(float(v) for v in re.findall(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", text, flags=re.M))


def held_at_last(url, seconds=20):
    """Requests that run or wait and the share of pages held, once there are none, or after so many seconds."""
    for _ in range(10 * seconds):
        held = {n: metric(url, n) for n in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}
        if not any(held.values()):
            break
        time.sleep(0.1)
    return held
