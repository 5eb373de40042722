"""Runs of `gva train` in processes of their own, small enough to be killed a few times over."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SIZE = [
    "hidden_size=32", "intermediate_size=64", "num_hidden_layers=2", "num_attention_heads=4",
    "value_head_dim=32", "length=48", "global_batch=8", "micro_batch=2", "eval_every=20", "eval_sequences=4",
    "log_every=5", "warmup=2",
]  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}


def command(data: Path, out: Path, *words: str, ranks: int = 1, variant: str = "gva-drope-16") -> list[str]:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    arguments = ["--preset", "demo", "--variant", variant, "--data", str(data), "--out", str(out), "--device", "cpu"]
    return [*launcher, "-m", "gva.cli", "train", *arguments, *words, *SIZE]


def finish(words: list[str], expect: int = 0) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=150, env=ENVIRONMENT)
    assert done.returncode == expect, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stderr


def kill_when(words: list[str], condition, delay: float, sent: int = signal.SIGKILL) -> bool:
    """Start, wait for the condition, wait a little more, kill the whole group. False if it ended before."""
    run = subprocess.Popen(
        words, env=ENVIRONMENT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 200
    while not condition() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.003)
    time.sleep(delay)
    alive = run.poll() is None
    if alive:
        os.killpg(run.pid, sent)
    run.wait()
    return alive
