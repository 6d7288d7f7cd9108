"""State dicts of sharded models and optimizers, whole parameters, and layouts of other meshes."""
