"""Checkpoint to scores: multiple-choice tasks by our own evaluator or by lm-evaluation-harness, validation loss."""
