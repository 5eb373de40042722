"""How fast a row decodes: one captured step of its model on a full paged cache.

Weights and cache are noise: their values do not matter to speed, nor does the seed. Every row has the same load, as
many sequences of the model's whole context as hold `TOKENS`.

Started by `gva.study.runner` as `python -m gva.study.speed JOB`, JOB being a JSON object: a process per row, so that
nothing else of the study lies on the GPU and a crash costs this figure alone.
"""

import json
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from gva.config import GvaConfig
from gva.model import GvaForCausalLM
from gva.ops import backend, flash
from gva.paged.generator import PagedGenerator
from gva.run.folder import commit, read_run
from gva.run.metrics import read_metrics, record
from gva.study.child import stop_with

KIND = "decode"  # of the line in a run's metrics
TOKENS = 2**18  # in the cache: far more bytes than caches on the chip hold, and 6 GiB of GQA at 350M parameters
WARM_UP = 3  # steps; the first is captured
STEPS = 50
DTYPE = torch.bfloat16
# What attention goes through, besides the implementations of gva.ops.
FLASH, REBUILT = "FlashAttention-3", "torch, keys rebuilt"


def main(job: dict[str, Any]) -> None:
    stop_with(job["parent"])
    run, device = Path(job["run"]), torch.device(job["device"])
    config = GvaConfig.from_dict(read_run(run)["identity"]["model"])
    try:
        if path(config, device) == "torch":
            flash.load(job["fa3"])
        reason = why_not(config, device)
        context = config.max_position_embeddings
        batch = max(1, job["tokens"] // context)
        found = {"reason": reason} if reason else measure(config, device, batch, context)
    except Exception as error:  # memory, a kernel that does not build: told in the report, no reason to fail the study
        traceback.print_exc()
        found = {"reason": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    keep(run, found)


def on_gpu(device: str | None) -> bool:
    """Whether training on `device`, None being the best there is, is training on a GPU."""
    return device == "cuda" or (device is None and torch.cuda.is_available())


def path(config: GvaConfig, device: torch.device) -> str:
    """What a decode step attends through."""
    if config.absorbs:
        return backend.select(None, device, DTYPE, DTYPE)
    if config.rotates_late or config.row.rope is not None:
        return REBUILT
    return FLASH if flash.available(device) else "torch"


def why_not(config: GvaConfig, device: torch.device) -> str | None:
    """Why a figure would tell nothing about this attention here, or None."""
    if config.absorbs:
        lacking = backend.missing(device, DTYPE, DTYPE)
        return f"its kernel needs {lacking}" if lacking else None
    if path(config, device) == "torch":
        return f"{FLASH} was not loaded (--fa3 or an installed vLLM, on a Hopper GPU), and slower code would mislead"
    return None


def measure(config: GvaConfig, device: torch.device, batch: int, context: int, steps: int = STEPS) -> dict[str, Any]:
    """The median time of a decode step that brings `batch` sequences to `context` tokens, and what it depends on."""
    beside = beside_tensors(device)
    model = GvaForCausalLM(config).to(device=device, dtype=DTYPE).eval()
    generator = filled(model, batch, context - 1, 1, compile=device.type == "cuda")
    times = []
    for _ in range(WARM_UP + steps):
        generator.cache.seq_lens.fill_(context - 1)  # the same step again, not the next
        wait(device)
        start = time.perf_counter()
        generator.step()
        wait(device)
        times.append(time.perf_counter() - start)
    median = statistics.median(times[WARM_UP:])
    return {
        "tokens_per_second": batch / median,
        "step_ms": 1e3 * median,
        "batch": batch,
        "context": context,
        "cache_bytes": generator.cache.nbytes,
        "attention": next((plan.config.impl for plan in generator.plans.values()), path(config, device)),
        "dtype": str(DTYPE).removeprefix("torch."),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "commit": commit(),
        "beside_gib": round(max(beside, beside_tensors(device)), 1),
    }


def beside_tensors(device: torch.device) -> float:
    """GiB of the GPU in use beside this process's tensors: its own context, below 1, and whatever other processes hold,
    whose work would be in the figure."""
    if device.type == "cpu":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / 2**30


def filled(model: Any, batch: int, context: int, room: int, page: int = 64, compile: bool = False) -> PagedGenerator:
    """A generator whose sequences all hold `context` tokens of noise, with room for more."""
    generator = PagedGenerator(model, batch, context + room, page=page, compile=compile)
    for pools in generator.cache.pools:
        for pool in pools:
            pool.normal_()
    generator.cache.reserve([context + room] * batch)
    generator.cache.advance([context] * batch)
    generator.active.fill_(1)
    return generator


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def keep(run: Path, found: dict[str, Any]) -> None:
    """Among the metrics of the finished run: they outlive its weights, and go wherever it is copied."""
    record(run, {"kind": KIND, "step": read_metrics(run, "done")[-1]["step"], **found})


def is_measured(run: Path) -> bool:
    return any("reason" not in line for line in read_metrics(run, KIND))


def told(run: Path) -> str:
    (line,) = read_metrics(run, KIND)
    return f"not measured: {line['reason']}" if "reason" in line else f"{line['tokens_per_second']:,.0f} tokens/s"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
