"""Decoding whole models on the paged cache: tokens per second of each variant, and the largest batch that fits.

    python benchmarks/end_to_end.py --capacity 32768 --fa3 path/to/_vllm_fa3_C.abi3.so --csv FILE

Random weights, a cache of random rows at the given length, one captured step replayed. GQA decodes through
FlashAttention-3 where it is given. Memory is what the device reports, not what is counted.
"""

import argparse
import gc
import statistics
import time
from pathlib import Path

import torch
from timing import append_rows, environment

from gva import GvaConfig, GvaForCausalLM, cost
from gva.ops import flash
from gva.study.speed import filled, wait


def measure(variant: str, batch: int, context: int, arguments: argparse.Namespace) -> dict:
    device = torch.device(arguments.device)
    steps = arguments.steps
    config = GvaConfig.preset(arguments.preset, variant=variant, max_position_embeddings=context + steps + 8)
    model = GvaForCausalLM(config).to(device=device, dtype=getattr(torch, arguments.dtype)).eval()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    generator = filled(model, batch, context, steps + 3, arguments.page, not arguments.eager)
    times = []
    for number in range(steps + 3):  # the first three warm up and capture
        wait(device)
        start = time.perf_counter()
        generator.step()
        wait(device)
        if number >= 3:
            times.append(time.perf_counter() - start)
    median = statistics.median(times)
    floor = cost.decode_step(config, batch, context, arguments.dtype)
    return {
        "preset": arguments.preset,
        "variant": variant,
        "batch": batch,
        "context": context,
        "page": arguments.page,
        "dtype": arguments.dtype,
        "compiled": not arguments.eager,
        "flash": not config.absorbs and flash.available(device),
        "step_ms": 1e3 * median,
        "step_spread_ms": 1e3 * (max(times) - min(times)),
        "tokens_per_second": batch / median,
        "floor_bytes": floor.bytes,
        "gb_per_second_of_floor": floor.bytes / median / 1e9,
        "cache_gib": generator.cache.nbytes / 2**30,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan"),
        **environment(arguments.commit),
    }


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
    parser.add_argument("--eager", action="store_true", help="no torch.compile")
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fa3", help="shared object with torch.ops._vllm_fa3_C")
    parser.add_argument("--csv", type=Path, help="append the rows here")
    parser.add_argument("--commit", help="what to record; by default that of the working tree")
    arguments = parser.parse_args()
    if arguments.fa3:
        flash.load(arguments.fa3)
    for shape in filter(None, arguments.shapes.split(",")):
        batch, context = map(int, shape.split("x"))
        first = None
        for variant in arguments.variants.split(","):
            row = measure(variant, batch, context, arguments)
            first = first or row["tokens_per_second"]
            row["against_first"] = row["tokens_per_second"] / first
            print(
                f"{shape:10s} {variant:19s} {row['tokens_per_second']:>10,.0f} tok/s  x{row['against_first']:.3f}  "
                f"step {row['step_ms']:.2f} ms, {row['gb_per_second_of_floor']:.0f} GB/s of the minimal bytes, "
                f"cache {row['cache_gib']:.2f} GiB, peak {row['peak_gib']:.2f} GiB",
                flush=True,
            )
            if arguments.csv is not None:
                append_rows(arguments.csv, [row])
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
