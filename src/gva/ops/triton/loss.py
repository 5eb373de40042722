"""Cross entropy of rows of logits, each overwritten by its gradient: one read from memory, one write."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def cross_entropy_kernel(logits, labels, losses, stride, V, ignored, BLOCK: tl.constexpr):
    """Grid: rows. losses[row] = -log softmax(logits[row])[label] in nats; logits[row] becomes its gradient,
    softmax - onehot. A row whose label is `ignored` has no loss and a gradient of zeros. The second pass over a row
    finds it in the L2 cache."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    counts = label != ignored
    p_row = logits + row * stride
    column = tl.arange(0, BLOCK)
    largest = float("-inf")
    total = 0.0
    for start in range(0, V, BLOCK):
        x = tl.load(p_row + start + column, mask=start + column < V, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp2((largest - new) * LOG2_E) + tl.sum(tl.exp2((x - new) * LOG2_E), 0)
        largest = new
    log2_total = tl.log2(total)
    target = tl.load(p_row + label, mask=counts, other=0.0).to(tl.float32)
    tl.store(losses + row, tl.where(counts, log2_total / LOG2_E + (largest - target), 0.0))
    tl.debug_barrier()  # every thread has read its target before any thread overwrites it
    for start in range(0, V, BLOCK):
        at = start + column
        x = tl.load(p_row + at, mask=at < V, other=float("-inf")).to(tl.float32)
        gradient = tl.exp2((x - largest) * LOG2_E - log2_total) - tl.where(at == label, 1.0, 0.0)
        gradient = tl.where(counts, gradient, 0.0)
        tl.store(p_row + at, gradient.to(logits.dtype.element_ty), mask=at < V)
