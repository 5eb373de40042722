"""What training leaves on disk and everything after it reads: the folder of a run, its metrics, its checkpoints."""
