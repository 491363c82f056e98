"""What Python does to tensors and modules outside of operators: it makes, moves and reads them."""
