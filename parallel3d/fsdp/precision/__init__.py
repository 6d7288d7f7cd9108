"""Which dtype is computed in: evaluation, classes of modules, buffers."""
