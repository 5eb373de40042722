"""Functions on tensors for Grouped Value Attention in the absorbed form, over a paged cache.

`api` checks, `library` is the node that torch.compile sees, `dispatch` chooses between `reference`, which runs anywhere
in any dtype, `triton`, which needs a GPU (or Triton's interpreter), and `cuda`, for Hopper; `fast` is a door past the
first two. Importing this loads torch alone.

Symbols: B sequences, T cached tokens, S new tokens per sequence, H query heads, G value groups, R = H/G, d_h value
width, d_r positional width, `page` tokens per page.
"""

from .api import absorb, append, expand, merge_states, paged_attention, paged_decode
from .call import Pages
from .distill import linear_distillation
from .layout import packed_row_bytes, packed_views, row_views, row_width
from .loss import linear_cross_entropy
from .plan import DecodePlan, plan_decode

__all__ = [
    "DecodePlan",
    "Pages",
    "absorb",
    "append",
    "expand",
    "linear_cross_entropy",
    "linear_distillation",
    "merge_states",
    "packed_row_bytes",
    "packed_views",
    "paged_attention",
    "paged_decode",
    "plan_decode",
    "row_views",
    "row_width",
]
