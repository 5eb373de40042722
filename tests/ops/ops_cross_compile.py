"""Compiles each kernel family for a GPU that need not be there, and prints its resources as JSON lines.

    python tests/ops/ops_cross_compile.py cuda:80 cuda:90 hip:gfx942

Run outside Triton's interpreter. Registers and spills come from the assembler of the CUDA targets; shared memory
(LDS) is Triton's own count.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gva.ops.call import Shape
from gva.ops.config import choose_triton, power_of_two
from gva.ops.triton import absorb, append, decode, expand, loss

FLOATS = {"value_scales", "losses", "lse", "part_out", "part_lse", "cos", "sin"}
INTEGERS = {"block_table", "seq_lens", "cu_seqlens_q", "schedule", "positions"}
LONGS = {"slots", "labels"}
G, R, D_H, D_R, PAGE = 4, 4, 64, 16, 64


def decode_constants(S=1, dtype=torch.bfloat16, fp8=False, fixed=0):
    value_dtype = torch.float8_e4m3fn if fp8 else dtype
    config = choose_triton(Shape(8, G * R, G, D_H, D_R, PAGE, dtype, value_dtype, S), True)
    unit = 4 if dtype == torch.float32 else 8
    constants = {
        "stride_vt": G * D_H // (2 if fp8 else 1),
        "stride_vg": D_H // (2 if fp8 else 1),
        "stride_kt": D_R,
        "stride_st": G,
        "stride_sg": 1,
        "R": R,
        "D_H": D_H,
        "D_R": D_R,
        "BLOCK_D": power_of_two(D_H),
        "BLOCK_R": 16,
        "GROUPS": config.groups,
        "ROWS": config.rows,
        "QUERIES": config.queries,
        "UNIFORM_S": S,
        "PAGE": PAGE,
        "TILE": config.tile,
        "FIXED_TILES": fixed,
        "UNIT_V": 8 if fp8 else unit,
        "UNIT_K": 8 if fp8 else unit,
        "WHOLE_COLUMNS": True,
        "HAS_SCALES": fp8,
        "HAS_LSE": True,
        "PRECISION": "ieee" if dtype == torch.float32 else None,
        "WIDEN": False,
        "ASM": True,
        "PDL": False,
        "STAGES": config.stages,
    }
    return decode.decode_kernel, constants, config.warps, config.stages, dtype, fp8


def families():
    """Name -> (kernel, constants, warps, stages, dtype, fp8)."""
    merge = {
        "R": R,
        "D_H": D_H,
        "BLOCK_D": 64,
        "GROUPS": 1,
        "QUERIES": 1,
        "UNIFORM_S": 1,
        "TILE": 64,
        "FIXED_TILES": 0,
        "HAS_LSE": True,
        "PDL": False,
        "PARTS": 16,
        "BLOCK_H": 1,
    }
    plan = {"UNIFORM_S": 1, "QUERIES": 1, "TILE": 64, "UNITS": 64, "SHARES": 32}
    keys = {"R": R, "H": G * R, "D_H": D_H, "D_N": D_H - D_R, "D_R": D_R, "BLOCK_D": 64, "BLOCK_K": 64, "TILE": 64}
    keys |= {"PAGE": 0, "PRECISION": None, "WIDEN": False}
    queries = {"H": G * R, "D_N": D_H - D_R, "D_H": D_H, "BLOCK_N": 64, "BLOCK_D": 64, "TILE": 32}
    queries |= {"PRECISION": None, "WIDEN": False}
    wide = {**queries, "D_N": 240, "D_H": 256, "BLOCK_N": 32, "PRECISION": "ieee"}
    new = {"G": G, "D_H": D_H, "D_R": D_R, "PAGE": PAGE, "BLOCK_G": 4, "BLOCK_D": 64, "BLOCK_R": 8, "ROTATE": True}
    return {
        "decode": decode_constants(),
        "decode S=8": decode_constants(S=8),
        "chunk S=256": decode_constants(S=256),
        "decode fp32": decode_constants(dtype=torch.float32),
        "decode fp8": decode_constants(fp8=True),
        "decode fixed split": decode_constants(fixed=16),
        "merge": (decode.merge_kernel, merge, 1, 3, torch.bfloat16, False),
        "plan": (decode.plan_kernel, plan, 4, 3, torch.bfloat16, False),
        "append": (append.append_kernel, {**new, "QUANTISE": False}, 4, 3, torch.bfloat16, False),
        "absorb": (absorb.absorb_kernel, queries, 4, 3, torch.bfloat16, False),
        "absorb wide fp32": (absorb.absorb_kernel, wide, 4, 3, torch.float32, False),
        "expand": (expand.expand_kernel, keys, 4, 3, torch.bfloat16, False),
        "expand pages": (expand.expand_kernel, {**keys, "PAGE": PAGE}, 4, 3, torch.bfloat16, False),
        "loss": (loss.cross_entropy_kernel, {"BLOCK": 8192}, 16, 3, torch.bfloat16, False),
        "distillation": (loss.distillation_kernel, {"BLOCK": 8192}, 16, 3, torch.bfloat16, False),
        "append fp8": (append.append_kernel, {**new, "QUANTISE": True}, 4, 3, torch.bfloat16, True),
    }


def compile_for(target, kernel, constants, warps, stages, dtype, fp8):
    """The compiled kernel for `target`, with every pointer 16-byte aligned."""
    element = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    signature, attributes = {}, {}
    pointers = {"q_absorbed", "q_rope", "k_rope", "out", "values", "value_pages", "rope_pages"}
    pointers |= {"maps", "keys", "repeated", "logits", "taught", "queries", "absorbed"}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in FLOATS:
            signature[name] = "*fp32"
        elif name in INTEGERS:
            signature[name] = "*i32"
        elif name in LONGS:
            signature[name] = "*i64"
        elif name in pointers:
            kind = element
            if fp8 and name == "values" and kernel is decode.decode_kernel:
                kind = "i16"
            if fp8 and name == "value_pages":
                kind = "fp8e4nv"
            signature[name] = f"*{kind}"
        else:
            signature[name] = "fp32" if name in ("scale_log2", "cold", "kl_factor") else "i32"
        if signature[name].startswith("*") or name in ("stride_qn", "stride_qh", "stride_rn", "stride_rh", "stride_on"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attributes)
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})


def resources(compiled) -> dict:
    """Shared memory, and for CUDA registers per thread and bytes of stack (spills)."""
    found = {"shared": compiled.metadata.shared}
    if "cubin" in compiled.asm:
        tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        numbers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        found |= {"registers": int(numbers[1]), "stack": int(numbers[2])}
    return found


def main(targets):
    for name in targets:
        backend, arch = name.split(":")
        target = GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget("hip", arch, 64)
        for family, recipe in families().items():
            if recipe[-1] and name != "cuda:90":
                continue  # fp8 needs sm89
            print(json.dumps({"target": name, "family": family, **resources(compile_for(target, *recipe))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
