"""Triton kernels of `gva.ops`. Imported only when they are used."""
