"""Attention to a cache in plain C, for processors: compiled once, by the compiler of the machine."""
