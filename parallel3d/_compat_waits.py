"""The methods of torch's process groups that start a collective, whose names are private in part."""

__all__ = ["COLLECTIVES"]

COLLECTIVES = (
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
    *("send", "recv", "recv_anysource", "barrier", "_end_coalescing"),
)
"""By torch's names of 2.11 and of 2.13; those that a group lacks are passed over."""
