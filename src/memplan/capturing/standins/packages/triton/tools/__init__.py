"""What host code makes to launch kernels."""
