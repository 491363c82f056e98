"""Jobs on the planned allocator, as they run."""
