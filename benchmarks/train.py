"""Training speed of the variants against GQA, in one run: tokens per second, MFU, and what the loop costs.

    python benchmarks/train.py --variants gqa,gva-drope-16 --csv benchmarks/results/train.csv

`bare` is forward, backward and optimizer on a batch that lies on the device; `loop` adds what `gva train` does
besides: loading, clipping, metrics. The floor is the model's FLOPs over the device's peak.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from timing import append_rows, environment

from gva import cost
from gva.data.shards import FORMAT, TokenDataset, write_shard
from gva.run.metrics import PEAK_FLOPS, Metrics
from gva.run.ranks import process_group
from gva.train import loop
from gva.train.parallel import arithmetic
from gva.train.recipe import build


def random_data(folder: Path, vocabulary: int, tokens: int, mean_document: int) -> TokenDataset:
    """Uniform tokens in documents of geometric lengths: speed does not depend on what they say."""
    generator = np.random.default_rng(0)
    drawn = generator.integers(0, vocabulary, tokens, dtype=np.uint16)
    ends = np.cumsum(generator.geometric(1 / mean_document, 2 * tokens // mean_document + 10))
    documents = [part for part in np.split(drawn, ends[ends < tokens]) if len(part)]
    shard = write_shard(folder, "train-00000", documents, tokens, {})
    index = {"format": FORMAT, "vocab_size": vocabulary, "splits": {"train": [asdict(shard)]}}
    (folder / "index.json").write_text(json.dumps(index))
    return TokenDataset(folder)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_per_step(step, steps: int, device: torch.device) -> list[float]:
    """Wall time per step, in chunks of five so that the device is rarely waited for."""
    times = []
    for _ in range(steps // 5):
        wait(device)
        start = time.perf_counter()
        for _ in range(5):
            step()
        wait(device)
        times.append((time.perf_counter() - start) / 5)
    return times


def kernel_times(step, device: torch.device, rows: int = 25) -> str:
    """Where the device spends three steps, by kernel."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    wait(device)
    start = time.perf_counter()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(3):
            step()
        wait(device)
        seconds = (time.perf_counter() - start) / 3
    kernels = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in kernels) / 3e6
    lines = [f"device busy {1e3 * busy:.1f} of {1e3 * seconds:.1f} ms a step, profiled"]
    lines += [f"{e.self_device_time_total / 3e3:8.2f} ms {e.count // 3:5d}x  {e.key[:100]}" for e in kernels[:rows]]
    return "\n".join(lines)


def measure(variant: str, arguments: argparse.Namespace, folder: Path) -> dict:
    overrides = {"length": arguments.length, "global_batch": arguments.batch, "micro_batch": arguments.batch}
    overrides |= {"steps": 10_000, "compile": not arguments.eager, "document_mask": arguments.document_mask}
    config, recipe = build(arguments.preset, variant, overrides)
    tokens = 64 * arguments.batch * arguments.length + 1
    dataset = random_data(folder, config.vocab_size - 1, tokens, arguments.mean_document)
    torch._dynamo.reset()
    with process_group(arguments.device) as ranks:
        run = loop._build(config, recipe, dataset, ranks)
        batch = {k: v.to(ranks.device) for k, v in run.batches.load(run.batches.indices(0)).items()}
        targets = recipe.global_batch * recipe.length

        def bare() -> None:
            with arithmetic(recipe, ranks.device):
                loss = run.loss(**batch)
                (loss / targets).backward()
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=True)

        metrics = Metrics(folder, 0, recipe.steps, True, False)
        flops = cost.train_flops_per_token(config, recipe.length)

        def whole() -> None:
            scalars = loop.train_step(run)
            run.step += 1
            metrics.step(run.step, scalars, lr=0.0, tokens=0)
            if run.step % recipe.log_every == 0:
                metrics.flush(targets, flops, 1)

        start = time.perf_counter()
        bare()
        whole()
        wait(ranks.device)
        compiled = time.perf_counter() - start
        seconds_per_step(bare, 5, ranks.device)
        bare_times = seconds_per_step(bare, arguments.steps, ranks.device)
        if arguments.profile:
            print(kernel_times(bare, ranks.device), flush=True)
        seconds_per_step(whole, 5, ranks.device)
        loop_times = seconds_per_step(whole, arguments.steps, ranks.device)
        metrics.close()
        (folder / "metrics.jsonl").unlink()
    name = torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu"
    peak = next((p for key, p in PEAK_FLOPS.items() if key in name), float("nan"))
    bare_s, loop_s = statistics.median(bare_times), statistics.median(loop_times)
    memory = torch.cuda.max_memory_allocated() / 2**30 if ranks.device.type == "cuda" else float("nan")
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return {
        "preset": arguments.preset,
        "variant": variant,
        "batch": arguments.batch,
        "length": arguments.length,
        "parameters": cost.parameters(config)["total"],
        "bare_ms": 1e3 * bare_s,
        "bare_spread_ms": 1e3 * (max(bare_times) - min(bare_times)),
        "loop_ms": 1e3 * loop_s,
        "loop_over_bare": loop_s / bare_s,
        "tokens_per_second": targets / bare_s,
        "loop_tokens_per_second": targets / loop_s,
        "mfu": targets / bare_s * flops / peak,
        "floor_ms": 1e3 * targets * flops / peak,
        "memory_gib": memory,
        "first_step_s": compiled,
        **({"mean_document": arguments.mean_document} if arguments.document_mask else {}),
        **{key: value for key, value in environment(arguments.commit).items() if key in ("gpu", "torch", "commit")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="paper-350m")
    parser.add_argument("--variants", default="gqa,gva-drope-16,mla,shared-kv")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--document-mask", action="store_true", help="no attention across packed documents")
    parser.add_argument("--mean-document", type=int, default=700, help="tokens per document")
    parser.add_argument("--device")
    parser.add_argument("--eager", action="store_true", help="no torch.compile")
    parser.add_argument("--profile", action="store_true", help="print where the device spends a bare step")
    parser.add_argument("--csv", type=Path, help="append the rows here")
    parser.add_argument("--commit", help="what to record; by default that of the working tree")
    arguments = parser.parse_args()
    rows = []
    for variant in arguments.variants.split(","):
        with tempfile.TemporaryDirectory() as folder:
            row = measure(variant, arguments, Path(folder))
        row["against_first"] = row["tokens_per_second"] / (
            rows[0]["tokens_per_second"] if rows else row["tokens_per_second"]
        )
        rows.append(row)
        print(
            f"{variant:19s} {row['tokens_per_second']:>11,.0f} tok/s  MFU {row['mfu']:6.1%}  "
            f"x{row['against_first']:.3f}  "
            f"step {row['bare_ms']:.1f} ms (floor {row['floor_ms']:.1f}), loop x{row['loop_over_bare']:.3f}, "
            f"{row['memory_gib']:.1f} GiB, first step {row['first_step_s']:.0f} s",
            flush=True,
        )
        if arguments.csv is not None:
            append_rows(arguments.csv, [row])


if __name__ == "__main__":
    main()
