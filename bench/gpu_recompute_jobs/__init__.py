"""What `bench.gpu_recompute` runs on a GPU: `models`, and `measure`, a process for each task."""
