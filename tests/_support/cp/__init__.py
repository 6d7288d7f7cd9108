"""Models under context parallelism."""
