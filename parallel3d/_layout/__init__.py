"""How a parameter lies on the ranks of one axis: what tensor parallelism and the engine both read."""
