"""Decode attention: GVA against FlashAttention-3 on the matched GQA, one GPU, one run.

    PYTHONPATH=src python benchmarks/decode.py --fa3 path/to/_vllm_fa3_C.abi3.so [--csv FILE] [--only single large]

Every case checks its own outputs against float64 first and is not reported otherwise. Times are medians over CUDA
graph replays; the inputs rotate so that one pass is at least three times the L2 cache. GQA has the same H, G and d_h,
hence 2 G d_h cached numbers per token where GVA has G d_h + d_r; FlashAttention-3 runs with precomputed scheduler
metadata and automatic splits, paged (both call forms) and contiguous, and its best counts. Efficiency is speed-up over
byte ratio.
"""

from __future__ import annotations

import argparse
import pathlib
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import product

import torch
from timing import Timing, append_rows, environment, rotation, time_calls

from gva import ops
from gva.ops import flash as fa3

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Shape:
    """One row of the table. `ragged`: lengths of a geometric mix from 1 to 32k with about B*T tokens in all."""

    suite: str
    B: int
    T: int
    H: int = 16
    G: int = 4
    d_h: int = 64
    d_r: int = 16
    S: int = 1
    page: int = 64
    layout: str = "separate"
    values: str = "bf16"
    ragged: bool = False

    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.T] * self.B
        step = 32768 ** (1 / (self.B - 1))
        mix = [step**i for i in range(self.B)]
        return [max(1, min(32768, round(n * self.T * self.B / sum(mix)))) for n in mix]

    @property
    def row_bytes(self) -> int:
        if self.values == "fp8":
            return ops.packed_row_bytes(self.G, self.d_h, self.d_r)
        return 2 * (self.G * self.d_h + self.d_r)

    @property
    def gqa_row_bytes(self) -> int:
        return 2 * self.G * self.d_h * (1 if self.values == "fp8" else 2)

    def __str__(self) -> str:
        extra = "".join(
            f" {n}={getattr(self, n)}"
            for n in ("S", "page", "layout", "values", "ragged")
            if getattr(self, n) != Shape.__dataclass_fields__[n].default
        )
        return f"{self.suite:7s} {self.B:4d} x {self.T:6d} H={self.H} G={self.G} d_h={self.d_h} d_r={self.d_r}{extra}"


WIDE = {"H": 32, "G": 8, "d_h": 128}
SHARED = {"H": 16, "G": 1}


def grid() -> list[Shape]:
    """Rows, as vLLM has them, of four models and four widths of the slice: 64, 256 and 1024 MiB, and one sequence."""
    heads = ({}, WIDE, {**SHARED, "d_h": 128}, {"H": 8, "G": 2})
    shapes = []
    for sizes, d_r in product(heads, (16, 32, 48, 64)):
        row = Shape("grid", 1, 8192, d_r=d_r, layout="row", **sizes)
        batches = [-(-mib * 2**20 // (row.T * row.row_bytes)) for mib in (64, 256, 1024)]
        shapes += [replace(row, B=B) for B in dict.fromkeys((1, *batches))]
        shapes += [replace(row, T=T) for T in (32768, 65536)]
    return shapes


SHAPES = [
    Shape("single", 1, 8192),
    Shape("single", 1, 32768),
    Shape("single", 1, 8192, **WIDE),
    Shape("single", 1, 32768, **WIDE),
    Shape("medium", 16, 8192),
    Shape("medium", 64, 8192),
    Shape("medium", 256, 2048),
    Shape("medium", 16, 8192, **WIDE),
    Shape("large", 64, 32768),
    Shape("large", 128, 32768),
    Shape("large", 64, 8192, **WIDE),
    Shape("large", 128, 8192, **WIDE),
    Shape("large", 64, 32768, H=8),
    Shape("large", 64, 32768, H=32),
    Shape("large", 64, 8192, H=16, G=8, d_h=128),
    Shape("large", 64, 8192, H=64, G=8, d_h=128),
    Shape("layout", 64, 32768, page=16),
    Shape("layout", 64, 32768, layout="row"),
    Shape("layout", 64, 8192, page=16),
    Shape("layout", 64, 8192, layout="row"),
    Shape("ragged", 64, 4096),
    Shape("ragged", 64, 4096, ragged=True),
    Shape("queries", 64, 8192, S=4),
    Shape("queries", 64, 8192, S=8),
    Shape("queries", 64, 8192, S=4, **WIDE),
    Shape("queries", 64, 8192, S=8, **WIDE),
    Shape("queries", 64, 8192, H=32, S=4),
    Shape("queries", 64, 8192, H=32, S=8),
    Shape("rows", 1, 32768, layout="row"),
    Shape("rows", 16, 8192, layout="row"),
    Shape("rows", 256, 2048, layout="row"),
    Shape("rows", 128, 32768, layout="row"),
    Shape("rows", 64, 8192, layout="row", **WIDE),
    Shape("rows", 64, 32768, layout="row", H=32),
    Shape("rows", 64, 32768, layout="row", page=16),
    Shape("rows", 64, 8192, layout="row", page=16),
    Shape("rows", 64, 4096, layout="row"),
    Shape("rows", 64, 4096, layout="row", ragged=True),
    Shape("rows", 64, 8192, layout="row", S=4),
    Shape("fp8", 128, 32768, values="fp8"),
    Shape("fp8", 128, 8192, values="fp8", **WIDE),
    Shape("shapes", 64, 32768, d_r=32),
    Shape("shapes", 64, 8192, d_r=32, **WIDE),
    Shape("shapes", 48, 6016, H=24, G=8, d_h=128, d_r=64),
    Shape("shapes", 128, 32768, d_h=128, d_r=32, **SHARED),
    Shape("shapes", 128, 16384, d_h=256, d_r=64, **SHARED),
    Shape("shapes", 64, 16384, H=12, G=3, d_r=32),
    Shape("shapes", 96, 4096, ragged=True),
    Shape("shapes", 128, 8192, values="fp8", d_r=32, **WIDE),
    Shape("shapes", 96, 10048, d_r=32, layout="row"),
    Shape("shapes", 1, 65536, d_r=32, layout="row", **WIDE),
    *grid(),
]


@dataclass
class Inputs:
    """Queries, a pool of pages and `copies` disjoint block tables over it."""

    shape: Shape
    lens: torch.Tensor
    tables: list[torch.Tensor]
    cached: int  # tokens
    q: torch.Tensor = field(init=False)

    @classmethod
    def make(cls, shape: Shape, row_bytes: int) -> Inputs:
        lengths = shape.lengths()
        pages = [-(-n // shape.page) for n in lengths]
        copies = rotation(sum(lengths) * row_bytes)
        order = torch.randperm(copies * sum(pages), device="cuda", dtype=torch.int32)
        tables = []
        for copy in range(copies):
            table = torch.zeros(shape.B, max(pages), device="cuda", dtype=torch.int32)
            at = copy * sum(pages)
            for b, n in enumerate(pages):
                table[b, :n] = order[at : at + n]
                at += n
            tables.append(table)
        inputs = cls(shape, torch.tensor(lengths, device="cuda", dtype=torch.int32), tables, sum(lengths))
        inputs.q = torch.randn(shape.B, shape.S, shape.H, shape.d_h, device="cuda", dtype=torch.bfloat16)
        return inputs

    @property
    def pool(self) -> int:
        return len(self.tables) * sum(-(-n // self.shape.page) for n in self.shape.lengths())


def check(name: str, got: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor) -> float:
    """Relative error; raises where it exceeds twice eager's in the same dtype plus 2 eps of the largest value."""
    error = (got.double() - exact).abs().max()
    budget = 2 * (eager.double() - exact).abs().max() + 2 * torch.finfo(got.dtype).eps * exact.abs().max()
    if not error <= budget:
        raise SystemExit(f"{name}: error {error:.2e} exceeds {budget:.2e}; nothing is reported")
    return float((got.double() - exact).norm() / exact.norm())


def gva(shape: Shape) -> tuple[Timing, Timing, float, int]:
    """Time of a call, time of planning, relative error, bytes that a call must read."""
    inputs = Inputs.make(shape, shape.row_bytes)
    P, G, d_h, d_r, page = inputs.pool, shape.G, shape.d_h, shape.d_r, shape.page
    if shape.values == "fp8":
        rows = torch.zeros(P, page, shape.row_bytes, device="cuda", dtype=torch.uint8)
        pages = ops.row_views(rows, G, d_h, d_r)
        slots = torch.arange(P * page, device="cuda").split(1 << 18)
        for part in slots:
            ops.append(
                torch.randn(len(part), G, d_h, device="cuda", dtype=torch.bfloat16),
                torch.randn(len(part), d_r, device="cuda", dtype=torch.bfloat16),
                pages.values,
                pages.k_rope,
                part,
                value_scales=pages.scales,
            )
    elif shape.layout == "row":
        rows = torch.randn(P, page, G * d_h + d_r, device="cuda", dtype=torch.bfloat16)
        pages = ops.row_views(rows, G, d_h, d_r)
    else:
        values = torch.randn(P, page, G, d_h, device="cuda", dtype=torch.bfloat16)
        pages = ops.Pages(values, torch.randn(P, page, d_r, device="cuda", dtype=torch.bfloat16))
    values, k_rope, scales = pages
    q_rope = torch.randn(shape.B, shape.S, shape.H, d_r, device="cuda", dtype=torch.bfloat16)
    scale = (d_h + d_r) ** -0.5
    plan = ops.plan_decode(
        inputs.lens,
        H=shape.H,
        G=G,
        d_h=d_h,
        d_r=d_r,
        page=page,
        dtype=torch.bfloat16,
        value_dtype=values.dtype,
        max_seqlen_q=shape.S,
        row_stride=values.stride(1),
    )
    out = torch.full_like(inputs.q, float("nan"))

    def call(table):
        return ops.paged_decode(
            inputs.q,
            q_rope,
            values,
            k_rope,
            table,
            inputs.lens,
            scale,
            value_scales=scales,
            plan=plan,
            out=out,
        )

    call(inputs.tables[-1])
    errors = []
    for b in sorted({0, shape.B - 1}):
        used = inputs.tables[-1][b, : -(-int(inputs.lens[b]) // page)].long()
        v, k = values[used], k_rope[used]
        if scales is not None:
            v = v.double() * scales[used][..., None]
        args = (
            torch.arange(len(used), device="cuda", dtype=torch.int32)[None],
            inputs.lens[b : b + 1],
            torch.tensor([0, shape.S], device="cuda", dtype=torch.int32),
            shape.S,
            scale,
        )
        exact, eager = (
            ops.paged_attention(*(x.to(dtype) for x in (inputs.q[b], q_rope[b], v, k)), *args, impl="reference")
            for dtype in (torch.float64, torch.bfloat16)
        )
        errors.append(check(f"GVA {shape} sequence {b}", out[b], exact, eager))
    timing = time_calls([lambda table=table: call(table) for table in inputs.tables])
    planning = time_calls([lambda: plan.update(inputs.lens)])
    return timing, planning, max(errors), inputs.cached * shape.row_bytes


@cache
def gqa(shape: Shape) -> dict[str, float]:
    """Microseconds of FlashAttention-3 on the matched GQA, per way of calling it. Once for all layouts of ours."""
    inputs = Inputs.make(shape, shape.gqa_row_bytes)
    B, S, H, G, d_h, page, max_len = shape.B, shape.S, shape.H, shape.G, shape.d_h, shape.page, max(shape.lengths())
    dtype, descale = torch.bfloat16, None
    k = torch.randn(inputs.pool, page, G, d_h, device="cuda", dtype=torch.bfloat16)
    v, q = torch.randn_like(k), inputs.q
    if shape.values == "fp8":
        dtype, descale = FP8, (torch.ones(B, G, device="cuda"),) * 3
        k, v, q = k.to(FP8), v.to(FP8), q.to(FP8)
    cu = torch.arange(B + 1, device="cuda", dtype=torch.int32) * S
    scale = d_h**-0.5
    common = {"S": S, "max_len": max_len, "scale": scale, "descale": descale}
    times = {}
    for form in ("varlen", "batched", "contiguous"):
        if form == "contiguous" and shape.ragged:
            continue
        metadata = fa3.metadata(
            inputs.lens,
            S=S,
            max_len=max_len,
            H=H,
            G=G,
            d_h=d_h,
            dtype=dtype,
            page=None if form == "contiguous" else page,
            cu_seqlens_q=cu if form == "varlen" else None,
        )
        if form == "contiguous":
            whole = (k.view(-1, B, shape.T, G, d_h), v.view(-1, B, shape.T, G, d_h))
            calls = [
                partial(fa3.attend, q, keys, values, inputs.lens, scheduler=metadata, **common)
                for keys, values in zip(*whole, strict=True)
            ]
            first = torch.arange(B * shape.T // page, device="cuda").view(B, -1)[0].long()
        else:
            queries, starts = (q.flatten(0, 1), cu) if form == "varlen" else (q, None)
            calls = [
                partial(
                    fa3.attend,
                    queries,
                    k,
                    v,
                    inputs.lens,
                    block_table=table,
                    cu_seqlens_q=starts,
                    scheduler=metadata,
                    **common,
                )
                for table in inputs.tables
            ]
            first = inputs.tables[0][0].long()
        got = calls[0]().view(B, S, H, d_h)[0]
        length = int(inputs.lens[0])
        keys, seen = k[first].flatten(0, 1)[:length], v[first].flatten(0, 1)[:length]
        exact, eager = (plain_gqa(q[0].to(t), keys.to(t), seen.to(t), scale) for t in (torch.float64, torch.bfloat16))
        if shape.values != "fp8":  # fp8 probabilities: no eager form to compare with
            check(f"FlashAttention-3 {form} {shape}", got, exact, eager)
        times[form] = time_calls(calls).median
    return times


def plain_gqa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [S, H, d_h], k and v [T, G, d_h]: causal attention of the newest S positions."""
    S, H, _ = q.shape
    T, G, _ = k.shape
    scores = torch.einsum("sgrd,tgd->sgrt", q.view(S, G, H // G, -1), k) * scale
    newest = torch.arange(T - S, T, device=q.device)[:, None]
    hidden = torch.arange(T, device=q.device) > newest
    weights = torch.softmax(scores.masked_fill(hidden[:, None, None], float("-inf")).to(torch.float64), -1)
    return torch.einsum("sgrt,tgd->sgrd", weights.to(q.dtype), v).reshape(S, H, -1)


def read_limit() -> float:
    """GB/s of a kernel that only reads 2 GiB: the practical ceiling of this GPU."""
    from read_kernel import sum_kernel

    data = torch.randint(0, 9, (1 << 29,), device="cuda", dtype=torch.int32)
    best = 0.0
    for programs, block, warps in ((528, 8192, 8), (1056, 4096, 8), (2112, 2048, 4), (528, 16384, 16)):
        out = torch.empty(programs * block, device="cuda", dtype=torch.int32)
        grid = (programs,)
        timing = time_calls([partial(sum_kernel[grid], data, out, len(data), BLOCK=block, num_warps=warps)])
        best = max(best, data.numel() * 4 / timing.median / 1e3)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fa3", help="shared object with torch.ops._vllm_fa3_C; without it no comparison is made")
    parser.add_argument("--csv", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results" / "decode.csv")
    parser.add_argument("--only", nargs="*", help="suites to run: " + ", ".join(sorted({s.suite for s in SHAPES})))
    parser.add_argument("--commit", help="what to record; by default that of the working tree")
    parser.add_argument("--list", action="store_true", help="show the shapes and what they hold, and measure nothing")
    options = parser.parse_args()
    shapes = [shape for shape in SHAPES if not options.only or shape.suite in options.only]
    if options.list:
        for shape in shapes:
            print(f"{shape!s:58s} {sum(shape.lengths()) * shape.row_bytes / 2**20:6.0f} MiB")
        return
    torch.manual_seed(0)
    if options.fa3:
        fa3.load(options.fa3)
    limit = read_limit()
    print(f"read limit {limit:.0f} GB/s")
    where = environment(options.commit)
    for shape in shapes:
        timing, planning, error, size = gva(shape)
        torch.cuda.empty_cache()
        # GQA pages of 16 fall off FlashAttention-3's fast path: it is compared at its own best, pages of 64.
        peers = gqa(replace(shape, suite="", d_r=16, page=64, layout="separate")) if options.fa3 else {}
        torch.cuda.empty_cache()
        ratio = shape.gqa_row_bytes / shape.row_bytes
        best = min(peers, key=peers.get) if peers else ""
        speedup = peers[best] / timing.median if peers else float("nan")
        row = {
            **asdict(shape),
            "us": round(timing.median, 2),
            "us_p20": round(timing.p20, 2),
            "us_p80": round(timing.p80, 2),
            "plan_us": round(planning.median, 2),
            "bytes": size,
            "gb_per_s": round(size / timing.median / 1e3),
            "of_read_limit": round(size / timing.median / 1e3 / limit, 3),
            "floor_us": round(size / limit / 1e3, 2),
            "fa3_us": round(peers[best], 2) if peers else "",
            "fa3_form": best,
            "byte_ratio": round(ratio, 3),
            "speedup": round(speedup, 3),
            "efficiency": round(speedup / ratio, 3),
            "relative_error": f"{error:.1e}",
            "read_limit_gb_per_s": round(limit),
            **where,
        }
        append_rows(options.csv, [row])
        print(
            f"{shape!s:58s} {size / 2**20:6.0f} MiB {timing.median:8.2f} us ({timing.p20:.2f}-{timing.p80:.2f}) "
            f"{row['gb_per_s']:5d} GB/s {row['of_read_limit']:.2f} of limit, FA3 {row['fa3_us']} us {best}, "
            f"x{speedup:.2f} of {ratio:.2f}: {row['efficiency']:.3f}, plan {planning.median:.1f} us",
            flush=True,
        )


if __name__ == "__main__":
    main()
