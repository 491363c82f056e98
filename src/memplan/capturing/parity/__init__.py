"""What PyTorch does otherwise because a dispatch mode watches it, and how that is put right."""
