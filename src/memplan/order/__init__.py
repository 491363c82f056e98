"""In which order to run the operators of a training step so that its peak is least."""
