"""A step on one rank: batch, forward, sample. Knows nothing of sockets."""
