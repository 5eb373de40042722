"""Tokens to checkpoint: one recipe for every variant, from a laptop to a cluster, exact after any kill."""
