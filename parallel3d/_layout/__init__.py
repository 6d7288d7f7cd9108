"""The layout of a parameter on the ranks of one axis, shared by tensor parallelism and the engine."""
