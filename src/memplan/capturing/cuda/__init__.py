"""The CUDA device that is not there: what PyTorch, NVML and `nvidia-smi` say of it."""
