"""GVA whose content keys also read the value of the token before, which is cached anyway.

    k_nope_h(t) = v_g(h)(t) M_h + v_g(h)(t-1) N_h      [.., H, d_n]

Before the first token of a sequence, or of a document in it, nothing stands. The N_h start at zero: the model begins as
GVA does. A query could absorb both maps, into a score 2 d_h + d_r wide over values that are read once; no kernel does
that, so every step rebuilds the keys of all that is cached.

Tokens side by side [.., T, G, d_h] are taken for one sequence. Who knows better hands `expand` the values before as a
third part of the row.
"""

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from gva.attention.base import Cached, per_head
from gva.attention.decoupled import DecoupledAttention, join
from gva.attention.gva import rebuild_keys, settle_map
from gva.attention.rope import Rotation


class LookBackValueAttention(DecoupledAttention):
    allocations = ("carved", "additive")
    fields = ("map_init",)
    absorbs = False
    looks_back = True
    settle = staticmethod(settle_map)

    @classmethod
    def maps(cls, config: Any) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(("key_map", "back_map"), (config.content_dim, config.value_head_dim))

    def expand(self, row: Cached, rotation: Rotation | None = None) -> tuple[Tensor, Tensor]:
        v, k_rope, *given = row
        before = given[0] if given else pad(v[..., :-1, :, :], (0, 0, 0, 0, 1, 0))
        own, back = (per_head(maps, self.config.content_dim, v) for maps in (self.key_map, self.back_map))
        return join(rebuild_keys(v, own) + rebuild_keys(before, back), k_rope), v
