"""What a run tells: metrics, samples, events. Reads and writes files, nothing else."""
