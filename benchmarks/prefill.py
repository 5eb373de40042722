"""Prefill attention: GVA in the expanded form, building its keys included, against GQA on the same backend.

    python benchmarks/prefill.py --fa3 path/to/_vllm_fa3_C.abi3.so --csv benchmarks/results/prefill.csv

GVA begins with the grouped values [B, T, G, d_h] and the rotated key [B, T, d_r], GQA with its keys and values; queries
are the same. The floor is the attention's FLOPs over the device's peak, and for what GVA adds the bytes of the keys and
values per head over the bandwidth of a copy.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from timing import append_rows, environment, time_calls
from torch.nn.attention import SDPBackend, sdpa_kernel

from gva import ops
from gva.ops import flash
from gva.ops.dense import Spans
from gva.run.metrics import PEAK_FLOPS

SHAPES = {  # H, G, d_h, d_r
    "64": (16, 4, 64, 16),
    "128": (32, 8, 128, 16),
}
SIZES = ((4, 2048), (1, 8192), (4, 8192), (1, 32768), (2, 32768))
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}


def attention(backend: str, scale: float) -> Callable:
    """Causal attention of q, k, v [B, T, heads, d]."""

    def fa3(q, k, v):
        B, T = q.shape[:2]
        starts = [T * i for i in range(B + 1)]
        spans = Spans(starts, T * torch.arange(B + 1, dtype=torch.int32, device=q.device))
        flat = (x.flatten(0, 1) for x in (q, k, v))
        return flash.varlen(*flat, spans, spans, scale, True, None)[0].unflatten(0, (B, T))

    def sdpa(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(BACKENDS[backend]):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
            )
        return out.transpose(1, 2)

    return fa3 if backend == "fa3" else sdpa


def measure(backend: str, B: int, T: int, shape: tuple[int, int, int, int], commit: str | None) -> dict:
    H, G, d_h, d_r = shape
    d_n, scale = d_h - d_r, d_h**-0.5
    draw = torch.Generator("cuda").manual_seed(T)
    like = {"dtype": torch.bfloat16, "device": "cuda", "generator": draw}
    q, keys = torch.randn(B, T, H, d_h, **like), torch.randn(B, T, G, d_h, **like)
    values, k_rope = torch.randn(B, T, G, d_h, **like), torch.randn(B, T, d_r, **like)
    maps = torch.randn(H, d_n, d_h, **like) * d_h**-0.5
    attend = attention(backend, scale)

    def gva():
        return attend(q, *ops.expand(values, k_rope, maps))

    check(gva(), q, values, k_rope, maps, scale)
    times = {
        "gva": time_calls([gva]),
        "gqa": time_calls([lambda: attend(q, keys, values)]),
        "expand": time_calls([lambda: ops.expand(values, k_rope, maps)]),
        "eager_expand": time_calls([lambda: ops.expand(values, k_rope, maps, impl="reference")]),
    }
    peak = next((p for key, p in PEAK_FLOPS.items() if key in torch.cuda.get_device_name()), float("nan"))
    written = 2 * B * T * H * 2 * d_h
    return {
        "backend": backend,
        "B": B,
        "T": T,
        "H": H,
        "G": G,
        "d_h": d_h,
        "d_r": d_r,
        **{f"{name}_us": timing.median for name, timing in times.items()},
        "gva_p20_us": times["gva"].p20,
        "gva_p80_us": times["gva"].p80,
        "gqa_p20_us": times["gqa"].p20,
        "gqa_p80_us": times["gqa"].p80,
        "gva_over_gqa": times["gva"].median / times["gqa"].median,
        "attention_floor_us": 2 * B * H * T * T * d_h / peak * 1e6,
        "expand_gb_per_s": written / times["expand"].median / 1e3,
        **environment(commit),
    }


def check(out, q, values, k_rope, maps, scale, rows: int = 64) -> None:
    """The last rows of the output against float64: a benchmark that computes something else has no time."""
    keys, repeated = ops.expand(values.double(), k_rope.double(), maps.double(), impl="reference")
    T = q.shape[1]
    scores = torch.einsum("bshd,bthd->bhst", q[:, -rows:].double(), keys) * scale
    future = torch.arange(T, device=q.device) > torch.arange(T - rows, T, device=q.device)[:, None]
    exact = torch.einsum("bhst,bthd->bshd", scores.masked_fill(future, float("-inf")).softmax(-1), repeated)
    error = ((out[:, -rows:].double() - exact).norm() / exact.norm()).item()
    if not error < 1e-2:
        raise AssertionError(f"relative error {error:.1e} against float64: nothing is reported")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fa3", help="shared object with torch.ops._vllm_fa3_C")
    parser.add_argument("--csv", type=Path, help="append the rows here")
    parser.add_argument("--commit", help="what to record; by default that of the working tree")
    arguments = parser.parse_args()
    backends = list(BACKENDS)
    if arguments.fa3:
        flash.load(arguments.fa3)
        backends.insert(0, "fa3")
    for name, shape in SHAPES.items():
        for B, T in SIZES:
            for backend in backends:
                row = measure(backend, B, T, shape, arguments.commit)
                print(
                    f"d_h {name:>3s} {B} x {T:<6d} {backend:6s} GQA {row['gqa_us']:.1f} us, GVA {row['gva_us']:.1f} us "
                    f"= {row['gva_over_gqa']:.3f}x (building K, repeating V {row['expand_us']:.1f} us at "
                    f"{row['expand_gb_per_s']:.0f} GB/s, in plain torch {row['eager_expand_us']:.1f}; "
                    f"floor of the attention {row['attention_floor_us']:.0f})",
                    flush=True,
                )
                if arguments.csv is not None:
                    append_rows(arguments.csv, [row])


if __name__ == "__main__":
    main()
