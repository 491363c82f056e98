"""Commands that start training jobs, read as a user types them: what they run, as which ranks."""
