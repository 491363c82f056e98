"""Contents of fake tensors that are known, and answers where a script asks for others."""
