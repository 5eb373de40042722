"""Text to tokens: documents from files or datasets, memory-mapped shards, batches in a seeded order."""
