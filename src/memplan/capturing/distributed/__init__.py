"""One rank of a distributed job, captured without the other ranks and without a network."""
