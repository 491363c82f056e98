"""Known contents of fake tensors, and answers where a script asks for unknown ones."""
