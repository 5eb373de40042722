"""A kernel that reads and adds up, nothing else: what the memory gives."""

import triton
import triton.language as tl


@triton.jit
def sum_kernel(data, out, size, BLOCK: tl.constexpr):
    """Grid: any number of programs, striding over `data` [size]."""
    index = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        total += tl.load(data + start + index)
    tl.store(out + tl.program_id(0) * BLOCK + index, total)
