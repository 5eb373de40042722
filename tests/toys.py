"""Attentions that the package does not have: classes derived from its base alone, and their registration."""

from contextlib import contextmanager

import torch

from gva import attention
from gva.attention import Attention, Part, Query, Row
from gva.attention.rope import rotate


class Toy(Attention):
    """Groups of values and a slice; the content key is the value with its halves swapped, cut to d_n."""

    positional = "decoupled"
    absorbs = True

    @classmethod
    def row(cls, config):
        return Row((Part(config.num_value_groups, config.value_head_dim),), Part(1, config.rope_dim, shared=True))

    @classmethod
    def projections(cls, config):
        row = cls.row(config)
        return {"v_proj": row.content[0], "k_rope_proj": row.rope}

    def project(self, hidden_states, rotation):
        q, v, k_rope = self.inputs(hidden_states)
        content, q_rope = q.split((self.config.content_dim, self.config.rope_dim), dim=-1)
        return Query(content, rotate(q_rope, rotation)), (v, rotate(k_rope, rotation).squeeze(-2))

    def expand(self, row, rotation=None):
        v, k_rope = row
        swapped = v.roll(v.shape[-1] // 2, -1)[..., : self.config.content_dim]
        return torch.cat((swapped, k_rope.unsqueeze(-2).expand(*swapped.shape[:-1], -1)), dim=-1), v

    def absorb(self, content):
        width = self.config.value_head_dim
        return torch.nn.functional.pad(content, (0, width - content.shape[-1])).roll(-(width // 2), -1)


class ToyExpanded(Toy):
    """The same, whose author knows no absorbed form."""

    absorbs = False


TOYS = {"toy": Toy, "toy-expanded": ToyExpanded}


@contextmanager
def registered(name):
    attention.register(name, TOYS[name])
    try:
        yield name
    finally:
        del attention._CLASSES[name]
