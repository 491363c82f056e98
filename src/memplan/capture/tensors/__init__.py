"""What a job does to tensors and modules without an operator: made, moved, resized, asked."""
