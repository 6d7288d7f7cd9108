"""What several packages need and that knows nothing of parallelism."""
