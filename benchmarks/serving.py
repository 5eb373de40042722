"""GVA against GQA in vLLM: cache capacity, decode latency, throughput and time to first token, in the same engine.

    python benchmarks/serving.py --csv benchmarks/results/serving.csv --commit HASH

Needs a GPU, vLLM and this package (`docs/serving.md`). Both variants of a preset are written with random weights into a
temporary folder and served by an engine with the same settings, each in a process of its own. Nothing is reported of
an engine whose tokens are not those of the HuggingFace model. A row is in the table as soon as it is measured; what was
cut short is taken up again with `--variants`, `--cases` and `--shapes`.

    capacity    tokens that the same cache memory holds
    decode      median time between steps in which all of `--decode-batch` requests of `--decode-context` tokens decode
    first       time to first token of one request of `--decode-context` tokens, alone
    throughput  output tokens per second of `--requests` requests of IN:OUT tokens, all there from the start; the median
                time between steps in which all decode, and the mean time to first token over them
"""

import argparse
import copy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from timing import append_rows, environment

CASES = ("capacity", "decode", "first", "throughput")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True, help="rows are appended")
    parser.add_argument("--commit", required=True, help="what was measured")
    parser.add_argument("--preset", default="paper-350m")
    parser.add_argument("--variants", default="gqa,gva-drope-16")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--cache-gib", type=float, default=117.5)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--decode-batch", type=int, default=512)
    parser.add_argument("--decode-context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=64, help="decode steps that are timed")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--shapes", default="8192:2048,4096:1024,4096:256", help="IN:OUT of the throughput cases")
    parser.add_argument("--repeats", type=int, default=1, help="of the throughput cases, a row each")
    parser.add_argument(
        "--graphs",
        choices=("none", "vllm", "steps"),
        default="vllm",
        help="CUDA graphs of the sizes that vLLM captures itself (512 tokens at most), or of whole steps too: what "
        "lies between two attentions is a graph then also where prompts are read. none: no compilation, for a trial",
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of the child: the checkpoint to measure
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    if arguments.folder is not None:
        measure(arguments)
        return
    from gva import GvaConfig, GvaForCausalLM

    longest = max([arguments.decode_context + 2048, *(sum(shape) for shape in shapes(arguments))])
    failed = []
    for variant in arguments.variants.split(","):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            config = GvaConfig.preset(arguments.preset, variant=variant, max_position_embeddings=longest)
            GvaForCausalLM(config).to(getattr(torch, arguments.dtype)).save_pretrained(folder)
            command = [sys.executable, __file__, *sys.argv[1:], "--variants", variant, "--folder", folder]
            if subprocess.run(command, check=False).returncode:
                failed.append(variant)  # the others are measured all the same
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def shapes(arguments: argparse.Namespace) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in shape.split(":")) for shape in arguments.shapes.split(",")]


def measure(arguments: argparse.Namespace) -> None:
    """All cases of one variant, on one engine."""
    import vllm

    begin = time.perf_counter()
    engine = vllm.LLM(
        model=str(arguments.folder),
        skip_tokenizer_init=True,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        kv_cache_memory_bytes=int(arguments.cache_gib * 2**30),
        block_size=arguments.block_size,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        enable_prefix_caching=False,
        enforce_eager=arguments.graphs == "none",
        compilation_config=graphs(arguments),
        disable_log_stats=True,
    )
    print(f"{arguments.variants}: engine after {time.perf_counter() - begin:.0f} s", flush=True)
    check_tokens(engine, arguments)
    Drive(engine, random_prompts(64, min(1000, arguments.decode_context)), 8)  # kernels compile at their first use
    print(f"{arguments.variants}: tokens are right after {time.perf_counter() - begin:.0f} s", flush=True)
    settings = {
        "preset": arguments.preset,
        "variant": arguments.variants,
        "dtype": arguments.dtype,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "block_size": arguments.block_size,
        "max_num_seqs": arguments.max_num_seqs,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
        "cache_gib": arguments.cache_gib,
        "graphs": arguments.graphs,
    }
    for case in arguments.cases.split(","):
        for result in globals()[f"measure_{case}"](engine, arguments):
            empty = {"requests": 0, "tokens_in": 0, "tokens_out": 0}
            row = {
                "case": case,
                **settings,
                **empty,
                **result,
                "vllm": vllm.__version__,
                **environment(arguments.commit),
            }
            append_rows(arguments.csv, [row])
            after = f"after {time.perf_counter() - begin:.0f} s"
            print(f"{arguments.variants}: {case} {result} {after}", flush=True)


def graphs(arguments: argparse.Namespace) -> dict:
    """What vLLM is told about CUDA graphs: its own sizes, then multiples of 512 tokens up to a whole step."""
    if arguments.graphs != "steps":
        return {}
    own = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16)]
    whole = arguments.max_num_batched_tokens
    return {"cudagraph_capture_sizes": [*own, *range(512, whole, 512), whole]}


def random_prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 1000, (count, length), generator=generator).tolist()


class Drive:
    """Requests run to their end: when each gave its first token, and when each step in which all decoded returned.
    `full_steps` > 0: no further than so many of these steps."""

    def __init__(self, engine: Any, prompts: list[list[int]], new: int, full_steps: int = 0) -> None:
        from vllm import SamplingParams

        core = engine.llm_engine
        self.first: dict[str, float] = {}
        self.full_steps: list[float] = []
        self.returned: list[float] = []
        self.begin = time.perf_counter()
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
            core.add_request(f"{id(self)}-{number}", {"prompt_token_ids": prompt}, sampling)
        while core.has_unfinished_requests():
            outputs = core.step()
            now = time.perf_counter()
            self.returned.append(now)
            for output in outputs:
                self.first.setdefault(output.request_id, now - self.begin)
            if len(outputs) == len(prompts) == len(self.first):
                self.full_steps.append(now)
            if len(self.full_steps) == full_steps > 0:
                core.abort_request(list(self.first))
        self.seconds = time.perf_counter() - self.begin

    def longest(self, count: int) -> list[tuple[float, int]]:
        """Milliseconds and number of the steps that took longest: a stall of the host shows here."""
        waits = [1e3 * (b - a) for a, b in pairwise([self.begin, *self.returned])]
        return sorted(((wait, number) for number, wait in enumerate(waits)), reverse=True)[:count]


def measure_capacity(engine: Any, arguments: argparse.Namespace) -> Iterator[dict]:
    tokens = engine.llm_engine.vllm_config.cache_config.num_gpu_blocks * arguments.block_size
    yield {"measure": "cache_tokens", "value": tokens}


def measure_decode(engine: Any, arguments: argparse.Namespace) -> Iterator[dict]:
    """While the last prompts are read the first requests decode already: all get enough new tokens to be there still
    when the last one is, so contexts are a little longer than asked; both variants' equally."""
    count, length, steps = arguments.decode_batch, arguments.decode_context, arguments.steps
    reading = -(-count * length // (arguments.max_num_batched_tokens - count))
    drive = Drive(engine, random_prompts(count, length), reading + steps + 32, full_steps=steps + 8)
    waits = [1e3 * (b - a) for a, b in pairwise(drive.full_steps[8:])]
    if len(waits) < steps // 2:
        raise RuntimeError(f"only {len(waits)} steps in which all {count} requests decoded; is the cache too small?")
    shape = {"requests": count, "tokens_in": length, "tokens_out": len(drive.full_steps)}
    yield {"measure": "inter_token_ms", "value": statistics.median(waits), **shape}


def measure_first(engine: Any, arguments: argparse.Namespace) -> Iterator[dict]:
    prompts = random_prompts(12, arguments.decode_context)
    times = [1e3 * next(iter(Drive(engine, [prompt], 1).first.values())) for prompt in prompts]
    shape = {"requests": 1, "tokens_in": arguments.decode_context, "tokens_out": 1}
    yield {"measure": "first_token_ms", "value": statistics.median(times[2:]), **shape}


def measure_throughput(engine: Any, arguments: argparse.Namespace) -> Iterator[dict]:
    for tokens_in, tokens_out in shapes(arguments) * arguments.repeats:
        drive = Drive(engine, random_prompts(arguments.requests, tokens_in), tokens_out)
        longest = ", ".join(f"{ms:.0f} ms in {number}" for ms, number in drive.longest(8))
        print(
            f"{arguments.variants}: {drive.seconds:.2f} s, {len(drive.returned)} steps, longest: {longest}", flush=True
        )
        shape = {"requests": arguments.requests, "tokens_in": tokens_in, "tokens_out": tokens_out}
        rate = arguments.requests * tokens_out / drive.seconds
        yield {"measure": "output_tokens_per_second", "value": rate, **shape}
        waits = [1e3 * (b - a) for a, b in pairwise(drive.full_steps)]
        if waits:
            yield {"measure": "inter_token_ms", "value": statistics.median(waits), **shape}
        yield {"measure": "mean_first_token_ms", "value": 1e3 * statistics.mean(drive.first.values()), **shape}


@torch.no_grad()
def check_tokens(engine: Any, arguments: argparse.Namespace) -> None:
    """Refuse to measure an engine that answers wrongly: each token must be the likeliest in the HuggingFace model in
    float32, or no further behind than rounding to the engine's dtype explains. An fp8 cache is not judged by this."""
    from vllm import SamplingParams

    from gva import GvaForCausalLM

    prompts = [prompt[:length] for prompt, length in zip(random_prompts(4, 700), (1, 60, 300, 700), strict=True)]
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    replies = engine.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    if arguments.kv_cache_dtype != "auto":
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rounded = GvaForCausalLM.from_pretrained(arguments.folder, dtype=arguments.dtype).to(device).eval()
    exact = copy.deepcopy(rounded).float()
    for prompt, reply in zip(prompts, replies, strict=True):
        answer = torch.tensor(reply.outputs[0].token_ids, device=device)
        ids = torch.cat((torch.tensor(prompt, device=device), answer))[None]
        truth, eager = (model(ids).logits[0, len(prompt) - 1 : -1].float() for model in (exact, rounded))
        error = (eager - truth).abs().amax(-1) + torch.finfo(rounded.dtype).eps * truth.abs().amax(-1)
        behind = truth.amax(-1) - truth.gather(1, answer[:, None])[:, 0]
        if (behind > 4 * error).any():
            raise RuntimeError(f"{arguments.variants}: the engine's tokens are not the model's; nothing is reported")


if __name__ == "__main__":
    main()
