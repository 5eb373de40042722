"""Trained checkpoints of others: taken in with the same logits, and brought to a smaller cache."""
