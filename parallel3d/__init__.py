"""parallel3d: FSDP, HSDP and tensor parallelism on a (replicate, shard, tp) mesh, in one call."""

__version__ = "0.1.0"
