"""Paged generation: the row and its pages, the cache, the ways to attend to it, the generator."""
