"""What `bench.gpu_order` runs on a GPU: `measure`, a process for each task."""
