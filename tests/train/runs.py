"""Runs small enough for a blink: in this process, or in some of their own that can be killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from gva.data.shards import TokenDataset
from gva.run.metrics import read_metrics
from gva.train import loop
from gva.train.recipe import build, read_overrides

SIZE = [
    "hidden_size=32", "intermediate_size=64", "num_hidden_layers=2", "num_attention_heads=4",
    "value_head_dim=32", "length=48", "global_batch=8", "micro_batch=2", "eval_every=20", "eval_sequences=4",
    "log_every=5", "warmup=2",
]  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}


def run_here(data, out, *words, variant="gva-drope-16", steps=12):
    overrides = read_overrides(None, [*SIZE, *words]) | {"steps": steps}
    config, recipe = build("demo", variant, overrides, TokenDataset(data).vocab_size)
    loop.train(config, recipe, data, out, device="cpu", progress=False)
    return read_metrics(out, "step")


def command(
    data: Path, out: Path, *words: str, variant: str = "gva-drope-16", device: str = "cpu", preset: str = "demo"
) -> list[str]:
    arguments = ["--preset", preset, "--variant", variant, "--data", str(data), "--out", str(out), "--device", device]
    return [sys.executable, "-m", "gva.cli", "train", *arguments, *words, *SIZE]


def start(words: list[str], ranks: int = 1) -> list[subprocess.Popen]:
    """One process per rank. Not torchrun: it puts its workers out of reach of a kill."""
    if ranks == 1:
        return [subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    group = {**ENVIRONMENT, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            words,
            env={**group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def finish(words: list[str], expect: int = 0, ranks: int = 1) -> str:
    """Run to the end; returns what the first rank said on standard error."""
    running = start(words, ranks)
    said = [process.communicate(timeout=150) for process in running]
    codes = [process.returncode for process in running]
    assert codes == [expect] * ranks, "\n".join(out[-1000:] + err[-3000:] for out, err in said)
    return said[0][1]


def kill_when(words: list[str], condition, delay: float = 0, sent: int = signal.SIGKILL, ranks: int = 1) -> bool:
    """Start, wait for the condition, wait a little more, kill every rank. False if one had ended before."""
    running = start(words, ranks)
    deadline = time.monotonic() + 100
    while not condition() and all(p.poll() is None for p in running) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay)
    alive = all(process.poll() is None for process in running)
    for process in running:
        process.send_signal(sent)
    for process in running:
        process.communicate()
    return alive
