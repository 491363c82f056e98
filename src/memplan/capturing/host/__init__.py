"""The host's RAM as the job's own process would use it."""
