"""A comparison as a matrix of training runs: what to run, running it, reading it back, and the statistics."""
