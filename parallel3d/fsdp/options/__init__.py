"""Options of the engine: each registers itself, and the core does not name it."""
