"""Triton kernels of `gva.ops`, each beside its launch; decode.py's are launched by attend.py. Launches take shapes and
strides, and never read a tensor's value on the host. Imported only when they are used."""

from . import absorb, append, attend, expand

__all__ = ["absorb", "append", "attend", "expand"]
