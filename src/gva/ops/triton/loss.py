"""Losses of rows of logits, each row overwritten by its gradient: one read from memory, one write."""

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


@triton.jit
def distillation_kernel(
    logits, taught, labels, losses, stride, taught_stride, V, ignored, cold, kl_factor, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid: rows. losses[row] = [cross entropy, KL] of `logits` against the label and against `taught`, the teacher's,
    the KL at a temperature of 1 / cold. logits[row] becomes the gradient of cross entropy + kl_factor / cold KL, which
    is softmax - onehot + kl_factor (q - p). A row whose label is `ignored` has no losses and a gradient of zeros."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    counts = label != ignored
    p_row, p_taught = logits + row * stride, taught + row * taught_stride
    column = tl.arange(0, BLOCK)
    low = float("-inf")
    largest = low
    largest_t = low
    total = 0.0
    total_q = 0.0
    total_p = 0.0
    for start in range(0, V, BLOCK):
        inside = start + column < V
        x = tl.load(p_row + start + column, mask=inside, other=low).to(tl.float32)
        t = tl.load(p_taught + start + column, mask=inside, other=low).to(tl.float32)
        new, new_t = tl.maximum(largest, tl.max(x, 0)), tl.maximum(largest_t, tl.max(t, 0))
        total = total * tl.exp2((largest - new) * LOG2_E) + tl.sum(tl.exp2((x - new) * LOG2_E), 0)
        total_q = total_q * tl.exp2((largest - new) * cold * LOG2_E) + tl.sum(tl.exp2((x - new) * cold * LOG2_E), 0)
        total_p = total_p * tl.exp2((largest_t - new_t) * cold * LOG2_E)
        total_p += tl.sum(tl.exp2((t - new_t) * cold * LOG2_E), 0)
        largest, largest_t = new, new_t
    log2_total, log2_q, log2_p = tl.log2(total), tl.log2(total_q), tl.log2(total_p)
    target = tl.load(p_row + label, mask=counts, other=0.0).to(tl.float32)
    tl.store(losses + 2 * row, tl.where(counts, log2_total / LOG2_E + (largest - target), 0.0))
    tl.debug_barrier()  # every thread has read its target before any thread overwrites it
    kl = 0.0
    for start in range(0, V, BLOCK):
        at = start + column
        inside = at < V
        x = tl.load(p_row + at, mask=inside, other=0.0).to(tl.float32)
        t = tl.load(p_taught + at, mask=inside, other=0.0).to(tl.float32)
        log2_of_q = (x - largest) * cold * LOG2_E - log2_q
        log2_of_p = (t - largest_t) * cold * LOG2_E - log2_p
        p = tl.exp2(log2_of_p)
        kl += tl.sum(tl.where(inside, p * (log2_of_p - log2_of_q), 0.0), 0)
        gradient = tl.exp2((x - largest) * LOG2_E - log2_total) - tl.where(at == label, 1.0, 0.0)
        gradient += kl_factor * (tl.exp2(log2_of_q) - p)
        gradient = tl.where(counts, gradient, 0.0)
        tl.store(p_row + at, gradient.to(logits.dtype.element_ty), mask=inside)
    tl.store(losses + 2 * row + 1, tl.where(counts, kl / LOG2_E, 0.0))
