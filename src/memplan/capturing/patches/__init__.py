"""What is replaced in PyTorch and other packages while a capture runs, and how it is put back."""
