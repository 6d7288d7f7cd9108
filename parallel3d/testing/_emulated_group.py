"""EmulatedGroup: a process group whose collectives are torch's fake ones, and take their time on a link."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from parallel3d._compat_emulated import add_fake_backend, plain_group
from parallel3d.testing._emulated_lines import CpuLine, CudaLine, Transfer

if TYPE_CHECKING:
    from parallel3d.testing.emulated_network import EmulatedNetwork

__all__ = ["BACKEND", "EmulatedGroup"]

BACKEND = "emulated"
WORLD_AXIS = "world"
_CPU = torch.device("cpu")


class EmulatedWork(dist.Work):
    """A transfer under way. Holds its tensors until it is waited for, as a real one must."""

    def __init__(
        self,
        line: CpuLine | CudaLine,
        transfers: list[Transfer],
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> None:
        super().__init__()
        self.line, self.transfers, self.outputs, self.inputs = line, transfers, outputs, inputs

    def wait(self, timeout: Any = None) -> bool:
        """Blocks the caller, or with CUDA the current stream, until it is over."""
        for transfer in self.transfers:
            self.line.wait(transfer)
        self.outputs, self.inputs = [], []
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return all(self.line.is_over(transfer) for transfer in self.transfers)

    def is_success(self) -> bool:
        """Whether it is over: nothing fails here."""
        return self.is_completed()

    def get_future(self) -> Any:
        """Complete, with the tensors, when the transfer is over (with CUDA: at once, on its stream)."""
        line = self.line
        if isinstance(line, CpuLine):
            future: Any = torch.futures.Future()
            outputs = self.outputs
            end = max((transfer.ended for transfer in self.transfers), default=0.0)
            line.clock.call_at(end, lambda: future.set_result(outputs))
            return future
        future = torch.futures.Future(devices=[line.device.current_device()])
        with line.device.stream(line.stream):  # whose end the reader's stream waits for
            future.set_result(self.outputs)
        return future


class EmulatedGroup(ProcessGroup):
    """See the module's docstring. A subclass of ``ProcessGroup``, so that C++ (DDP's reducer) calls it too.

    What is called here is called on ``inner``, a group that only dispatches: so values are those of torch's
    fake group, and whatever looks at collectives as torch dispatches them sees these.
    """

    def __init__(self, network: EmulatedNetwork, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        add_fake_backend(self)
        self.inner = plain_group(options.store, options.group_rank, options.group_size)
        self.network = network
        self.axis = ""
        self._coalesced: list[EmulatedWork] | None = None

    def getBackendName(self) -> str:
        """What torch calls it."""
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)  # type: ignore[arg-type]
        self.inner._set_group_name(name)  # type: ignore[arg-type]

    def _set_group_desc(self, description: str) -> None:
        super()._set_group_desc(description)
        self.axis = description.removeprefix("mesh_") if description.startswith("mesh_") else ""
        if description in ("default_pg", "mesh_default"):
            self.axis = WORLD_AXIS
        if self.axis and self.size() > 1:
            self.network.check_axis(self.axis)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> EmulatedWork:
        works, self._coalesced = self._coalesced or [], None
        line = works[0].line if works else self.network.line(self.axis, device)
        whole = EmulatedWork(line, [], [], [])
        for work in works:
            whole.transfers += work.transfers
            whole.outputs += work.outputs
            whole.inputs += work.inputs
        return whole

    def run(self, name: str, op: str, args: tuple, kwargs: dict) -> EmulatedWork:
        """Calls ``name`` on the inner group and lets what it sends go through the link."""
        network, n = self.network, self.size()
        issued = network.clock.now()
        outputs, inputs = list(_tensors(args[:1])), list(_tensors(args[1:2]))
        held = outputs + inputs
        line = network.line(self.axis, held[0].device if held else _CPU)
        with line.values():
            getattr(self.inner, name)(*args, **kwargs)
        network.clock.rewind_to(issued)
        transfers = []
        if n > 1:
            size = max(_bytes(outputs), _bytes(inputs))
            share = _SHARE[op](n) if op in _SHARE else 1
            transfers = [network.begin(line, op, self.axis, math.ceil(size * share), issued)]
        work = EmulatedWork(line, transfers, outputs, inputs)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


def _rest(n: int) -> float:
    return (n - 1) / n


# Of the whole tensor, the share that a rank of n sends in the algorithms that send least, rings: the factors
# of "bus bandwidth" in NVIDIA's nccl-tests (doc/PERFORMANCE.md), after Patarasuk and Yuan, "Bandwidth
# optimal all-reduce algorithms for clusters of workstations", 2009. Broadcast and the others: all of it.
_SHARE: dict[str, Callable[[int], float]] = {
    "all_gather": _rest,
    "reduce_scatter": _rest,
    "all_to_all": _rest,
    "all_reduce": lambda n: 2 * _rest(n),
}

# Methods of ProcessGroup, by torch's names of 2.11 and of 2.13.
_CALLS = {
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "barrier": "barrier",
}


def _method(name: str, op: str) -> Callable[..., EmulatedWork]:
    def call(self: EmulatedGroup, *args: Any, **kwargs: Any) -> EmulatedWork:
        return self.run(name, op, args, kwargs)

    return call


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    """The tensors in ``values`` and in the lists among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


for _name, _op in _CALLS.items():
    if hasattr(ProcessGroup, _name):
        setattr(EmulatedGroup, _name, _method(_name, _op))
