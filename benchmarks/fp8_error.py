"""What caching values as e4m3 does to attention's output, against the bfloat16 cache; float64 arithmetic, any machine.

    python benchmarks/fp8_error.py --csv benchmarks/results/fp8-error.csv

`spread` is the standard deviation of the scores: the larger, the fewer tokens share the attention, and the less their
errors average out. The values are the keys too, so their errors move the weights as well.
"""

import argparse
from pathlib import Path

import torch
from timing import append_rows, environment

from gva import ops
from gva.ops import reference

H, G, d_r, page = 16, 4, 16, 64


def measure(d_h: int, T: int, spread: float) -> dict:
    draw = torch.Generator().manual_seed(0)
    pages = T // page
    values = torch.randn(pages, page, G, d_h, generator=draw, dtype=torch.float64).bfloat16()
    k_rope = torch.randn(pages, page, d_r, generator=draw, dtype=torch.float64).bfloat16()
    q, q_rope = (torch.randn(1, H, d, generator=draw, dtype=torch.float64) * spread for d in (d_h, d_r))
    quantised, scales = reference.quantise(values)
    table, lens = torch.arange(pages, dtype=torch.int32)[None], torch.tensor([T], dtype=torch.int32)

    def attend(cached: torch.Tensor) -> torch.Tensor:
        out = ops.paged_attention(
            q, q_rope, cached.double(), k_rope.double(), table, lens, None, 1, (d_h + d_r) ** -0.5, impl="reference"
        )
        assert isinstance(out, torch.Tensor)
        return out

    exact, rounded = attend(values), attend(quantised.double() * scales[..., None])
    return {
        "d_h": d_h,
        "T": T,
        "spread": spread,
        "value_error": (
            (quantised.double() * scales[..., None] - values.double()).norm() / values.double().norm()
        ).item(),
        "output_error": ((rounded - exact).norm() / exact.norm()).item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="append the rows here")
    parser.add_argument("--commit", help="what to record; by default that of the working tree")
    arguments = parser.parse_args()
    for d_h in (64, 128):
        for spread in (1.0, 3.0, 10.0):
            row = {**measure(d_h, 4096, spread), **environment(arguments.commit)}
            print(f"d_h {d_h}, spread {spread:g}: values {row['value_error']:.4f}, output {row['output_error']:.4f}")
            if arguments.csv is not None:
                append_rows(arguments.csv, [row])


if __name__ == "__main__":
    main()
