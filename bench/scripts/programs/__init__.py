"""Short training programs for packages that ship none, written as their documentation shows."""
