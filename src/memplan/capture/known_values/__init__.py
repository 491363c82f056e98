"""What is known of the contents of fake tensors, and what a script is told that asks for more."""
