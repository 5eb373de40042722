"""Decoding whole models: tokens per second of each variant, and the largest batch that fits.

    python benchmarks/end_to_end.py --capacity 32768 --fa3 path/to/_vllm_fa3_C.abi3.so --csv FILE
    python benchmarks/end_to_end.py --device cpu --dtype float32 --eager --shapes 8x4096,1x8192 --huggingface

Random weights, a cache of random rows at the given length, one captured step replayed; prompts are no part of it. GQA
decodes through FlashAttention-3 where it is given. Memory is what the device reports, not what is counted.

Without a GPU the steps of two variants take turns with a reading of memory, so that whatever else the machine does
falls on all of them; `--clock processor`, with one thread, leaves out the time in which others had the processor.
`--huggingface` adds a forward pass on transformers' DynamicCache and StaticCache, eager.
"""

import argparse
import functools
import gc
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from timing import append_rows, environment
from transformers import Cache, DynamicCache, StaticCache

from gva import GvaConfig, GvaForCausalLM, cost
from gva.ops import flash
from gva.study.speed import filled, wait

WARM_UP = 3  # steps; on a GPU the first is captured
READ = 2**28  # bytes that are summed up to learn how fast memory is
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


class Decoder:
    """A model, a full cache, and a step of the two. `through`: 'pages', 'dynamic' or 'static'."""

    def __init__(self, variant: str, batch: int, context: int, through: str, arguments: argparse.Namespace) -> None:
        device, room = torch.device(arguments.device), arguments.steps + WARM_UP
        self.variant = variant
        self.times: list[float] = []
        self.config = GvaConfig.preset(arguments.preset, variant=variant, max_position_embeddings=context + room + 5)
        self.floor = cost.decode_step(self.config, batch, context, arguments.dtype).bytes
        model = GvaForCausalLM(self.config).to(device=device, dtype=getattr(torch, arguments.dtype)).eval()
        self.step: Callable[[], object]
        if through == "pages":
            generator = filled(model, batch, context, room, arguments.page, not arguments.eager)
            self.step, self.cache_bytes = generator.step, generator.cache.nbytes
        else:
            ids = torch.zeros(batch, 1, dtype=torch.long, device=device)
            cache = stock(model, ids, through, context, context + room)
            self.step = functools.partial(model, ids, past_key_values=cache)
            self.cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def stock(model: GvaForCausalLM, ids: torch.Tensor, kind: str, context: int, capacity: int) -> Cache:
    """A cache of transformers that holds `context` tokens of noise."""
    cache = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=capacity)
    model(ids, past_key_values=cache)  # which gives it its shapes
    for layer in cache.layers:
        if kind == "dynamic":
            layer.keys, layer.values = (
                x.new_empty(*x.shape[:2], context, x.shape[3]).normal_() for x in (layer.keys, layer.values)
            )
        else:
            layer.keys.normal_(), layer.values.normal_(), layer.cumulative_length.fill_(context)
    return cache


@torch.no_grad()
def measure(variants: list[str], batch: int, context: int, through: str, arguments: argparse.Namespace) -> list[dict]:
    """A row for each variant, their steps taken in turns; `against_first` is the median over the turns."""
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clock = CLOCKS[arguments.clock]
    decoders = [Decoder(variant, batch, context, through, arguments) for variant in variants]
    memory = torch.ones(READ // 4) if device.type == "cpu" else torch.ones(1)
    reads = []
    for _ in range(WARM_UP + arguments.steps):
        reads.append(timed(memory.sum, memory.device, clock))
        for decoder in decoders:
            decoder.times.append(timed(decoder.step, device, clock))
    read, first = statistics.median(reads), decoders[0].times[WARM_UP:]
    rows = []
    for decoder in decoders:
        times, config = decoder.times[WARM_UP:], decoder.config
        median = statistics.median(times)
        rows.append({
            "preset": arguments.preset,
            "variant": decoder.variant,
            "batch": batch,
            "context": context,
            "page": arguments.page,
            "dtype": arguments.dtype,
            "compiled": not arguments.eager,
            "flash": not config.absorbs and flash.available(device),
            "step_ms": 1e3 * median,
            "step_spread_ms": 1e3 * (max(times) - min(times)),
            "tokens_per_second": batch / median,
            "floor_bytes": decoder.floor,
            "gb_per_second_of_floor": decoder.floor / median / 1e9,
            "cache_gib": decoder.cache_bytes / 2**30,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan"),
            **environment(arguments.commit),
            "against_first": statistics.median(a / b for a, b in zip(first, times, strict=True)),
        })  # fmt: skip
        if device.type == "cpu" or arguments.huggingface:
            rows[-1] |= {
                "through": through,
                "byte_ratio": decoders[0].floor / decoder.floor,
                "read_gb_per_s": READ / read / 1e9,
                "times_floor": median / (decoder.floor / (READ / read)),
                "threads": torch.get_num_threads(),
                "load": os.getloadavg()[0],
                "transformers": importlib.metadata.version("transformers"),
                "clock": arguments.clock,
            }
    return rows


def timed(call: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    wait(device)
    start = clock()
    call()
    wait(device)
    return clock() - start


def largest_batch(variant: str, context: int, arguments: argparse.Namespace) -> dict:
    """The largest batch that decodes at this context on the device, where one more runs out of memory: tried."""
    device = torch.device(arguments.device)
    config = GvaConfig.preset(arguments.preset, variant=variant, max_position_embeddings=context + 8)
    model = GvaForCausalLM(config).to(device=device, dtype=getattr(torch, arguments.dtype)).eval()

    def fits(batch: int) -> bool:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            generator = filled(model, batch, context - 2, 2, arguments.page, compile=False)
            generator.step()
            generator.step()
            wait(device)
        except torch.OutOfMemoryError:
            return False
        return True

    free, total = torch.cuda.mem_get_info()
    batch = free // (context * cost.cache_bytes_per_token(config, arguments.dtype))
    while not fits(batch):
        batch -= 1
    peak = torch.cuda.max_memory_allocated() / 2**30
    while fits(batch + 1):
        batch += 1
        peak = torch.cuda.max_memory_allocated() / 2**30
    return {
        "context": context,
        "variant": variant,
        "largest_batch": batch,
        "peak_gib": peak,
        "device_gib": total / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="paper-350m")
    parser.add_argument("--variants", default="gqa,gva-drope-16,mla")
    parser.add_argument("--shapes", default="256x8192,64x32768", help="batch x context, comma-separated")
    parser.add_argument("--capacity", type=int, help="also find the largest batch at this context; GPU only")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--huggingface", action="store_true", help="also on the caches of transformers")
    parser.add_argument("--eager", action="store_true", help="no torch.compile")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="of steps on a CPU")
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fa3", help="shared object with torch.ops._vllm_fa3_C")
    parser.add_argument("--csv", type=Path, help="append the rows here")
    parser.add_argument("--commit", help="what to record; by default that of the working tree")
    arguments = parser.parse_args()
    if arguments.fa3:
        flash.load(arguments.fa3)
    first, *others = arguments.variants.split(",")
    caches = ["pages", "dynamic", "static"] if arguments.huggingface else ["pages"]
    for shape in filter(None, arguments.shapes.split(",")):
        batch, context = map(int, shape.split("x"))
        for through in caches:
            if arguments.device == "cpu":
                rows = [row for other in others for row in measure([first, other], batch, context, through, arguments)]
            else:  # one at a time, for the memory
                rows = [measure([v], batch, context, through, arguments)[0] for v in (first, *others)]
                for row in rows:
                    row["against_first"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
            for row in rows:
                floor = f", {row['times_floor']:.2f} times the floor" if "times_floor" in row else ""
                print(
                    f"{shape:10s} {through:7s} {row['variant']:19s} {row['tokens_per_second']:>10,.1f} tok/s  "
                    f"x{row['against_first']:.3f}  step {row['step_ms']:.2f} ms, {row['gb_per_second_of_floor']:.1f} "
                    f"GB/s of the minimal bytes{floor}, cache {row['cache_gib']:.2f}, peak {row['peak_gib']:.2f} GiB",
                    flush=True,
                )
            if arguments.csv is not None:
                append_rows(arguments.csv, rows)
    if arguments.capacity:
        first = None
        for variant in arguments.variants.split(","):
            found = largest_batch(variant, arguments.capacity, arguments)
            first = first or found["largest_batch"]
            found |= {"page": arguments.page, "against_first": found["largest_batch"] / first}
            print(
                f"{variant:19s} {found['largest_batch']:>5d} sequences of {arguments.capacity} tokens, "
                f"x{found['against_first']:.3f}; peak {found['peak_gib']:.2f} of {found['device_gib']:.2f} GiB",
                flush=True,
            )
            if arguments.csv is not None:
                row = {"preset": arguments.preset, "dtype": arguments.dtype, **found, **environment(arguments.commit)}
                append_rows(arguments.csv.with_name("capacity.csv"), [row])


if __name__ == "__main__":
    main()
