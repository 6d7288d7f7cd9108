"""EmulatedNetwork: one process as one rank of many, whose collectives take the time a network would.

links = {"nic": Link(latency=20e-6, bandwidth=50e9), "nvlink": Link(latency=5e-6, bandwidth=450e9)}
axes = {"replicate": "nic", "shard": "nic", "tp": "nvlink"}
with EmulatedNetwork(world_size=64, links=links, axes=axes) as network:
    mesh = p3d.build_mesh(p3d.MeshLayout(2, 16, 2), device_type="cpu")
    ...  # any engine: ours, torch's fully_shard, DDP
    print(network)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from parallel3d._compat import fake_outputs_written
from parallel3d._trace import issuing
from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.testing._emulated_group import BACKEND, WORLD_AXIS, EmulatedGroup
from parallel3d.testing._emulated_lines import (
    CpuLine,
    CudaLine,
    Transfer,
    VirtualClock,
    WallClock,
    line_for,
)
from parallel3d.testing.worlds import check_no_group, check_rank, destroy_group

__all__ = ["EmulatedNetwork", "Link", "Transfer", "VirtualClock"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """What collectives of one or several mesh axes go through, one after another.

    Attributes:
        latency: seconds that a collective takes beside its bytes.
        bandwidth: bytes a second, one way.

    Raises:
        Parallel3dError: a latency below 0, or a bandwidth not above 0.
    """

    latency: float = 0.0
    bandwidth: float = float("inf")

    def __post_init__(self) -> None:
        if not self.latency >= 0 or self.latency == float("inf"):
            raise Parallel3dError(f"latency={self.latency!r}: give seconds, 0 or more")
        if not self.bandwidth > 0:
            raise Parallel3dError(f"bandwidth={self.bandwidth!r}: give bytes a second, more than 0")

    def seconds(self, size: int) -> float:
        """What ``size`` bytes take: latency + size / bandwidth."""
        return self.latency + size / self.bandwidth


class EmulatedNetwork:
    """This process becomes rank ``rank`` of ``world_size``; meshes made within have their groups on it.

    A collective of a group of n ranks sends what a ring algorithm sends (the factors of NVIDIA's nccl-tests,
    doc/PERFORMANCE.md): (n - 1) / n of the whole tensor in an all-gather, reduce-scatter or all-to-all, twice
    that in an all-reduce, all of it in a broadcast. It starts when those before it on its link have ended and
    takes ``Link.seconds``, during which no CPU works for it. Where the data are on the CPU, ``wait`` sleeps
    until the end; where they are on a GPU, a stream of the link's is busy for that time and ``wait`` lets the
    current stream wait. Synchronous calls wait for themselves.

    Values are those of torch's fake process group: finite, but not what ranks would exchange. A gather
    repeats this rank's part, a reduction leaves it as it is. They are written when the call is made; in real
    time that takes the CPU's (or the link's stream's): let transfers be long beside it. A ``VirtualClock``
    does not count it.

    Args:
        world_size: number of ranks.
        rank: which of them this process is.
        links: name -> link.
        axes: mesh axis -> name of its link; all axes longer than 1 must be there. Without it all are on the
            first link. A mesh of one axis as long as the world uses torch's default group, which no axis
            names: it is ``"world"`` here, and on the first link unless named, until ``attach`` tells.
        clock: ``VirtualClock()``, for figures that don't depend on the machine; by default real time.

    Attributes:
        timeline: the transfers so far, in the order they were issued.

    Raises:
        Parallel3dError: no links, an unknown link, a mesh axis without one.
        MeshError: ``rank`` or ``world_size`` out of range.
        StateError: on entering, a default process group is already initialised.
    """

    def __init__(
        self,
        *,
        world_size: int,
        links: Mapping[str, Link],
        axes: Mapping[str, str] | None = None,
        rank: int = 0,
        clock: VirtualClock | None = None,
    ) -> None:
        check_rank(rank, world_size)
        if not links:
            raise Parallel3dError("links: give at least one, such as {'nic': Link(bandwidth=50e9)}")
        for axis, name in (axes or {}).items():
            if name not in links:
                raise Parallel3dError(
                    f"axes: {axis!r} is on link {name!r}, but the links are {', '.join(map(repr, links))}"
                )
        self.rank, self.world_size = rank, world_size
        self.links, self.axes = dict(links), axes if axes is None else dict(axes)
        self.clock: WallClock | VirtualClock = clock or WallClock()
        self._lines: dict[tuple[str, torch.device], CpuLine | CudaLine] = {}
        self._timeline: list[Transfer] = []

    def __enter__(self) -> EmulatedNetwork:
        check_no_group("EmulatedNetwork")
        if not hasattr(dist.Backend, BACKEND.upper()):
            dist.Backend.register_backend(
                BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"]
            )
        with ExitStack() as stack:
            _entered.append(self)
            stack.callback(_entered.pop)
            stack.enter_context(fake_outputs_written())
            dist.init_process_group(
                BACKEND, rank=self.rank, world_size=self.world_size, store=dist.HashStore()
            )
            stack.callback(destroy_group)
            stack.callback(self.clock.close)
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def attach(self, mesh: dist.DeviceMesh) -> None:
        """Names the default group after the axis of ``mesh`` that uses it, and puts it on that one's link."""
        for axis in mesh.mesh_dim_names or ():
            group = mesh.get_group(axis)
            if isinstance(group, EmulatedGroup) and group.axis == WORLD_AXIS and group.size() > 1:
                self.check_axis(axis)
                group.axis = axis

    @property
    def timeline(self) -> list[Transfer]:
        """See the class. On a GPU, reading it synchronizes."""
        for transfer in self._timeline:
            if transfer.events is not None:
                device, link = transfer.events[0].device, transfer.link
                self._lines[link, device].resolve(transfer)
        return self._timeline

    def clear(self) -> None:
        """Forgets the transfers so far; those under way go on."""
        self._timeline = []

    def busy(self, link: str) -> float:
        """Seconds that the transfers on ``link`` take in sum.

        Raises:
            Parallel3dError: there is no such link.
        """
        if link not in self.links:
            raise Parallel3dError(
                f"link {link!r}: the links are {', '.join(map(repr, self.links))}"
            )
        return sum(t.ended - t.started for t in self.timeline if t.link == link)

    def __str__(self) -> str:
        head = f"{'issued':>10} {'started':>10} {'ended':>10} {'waited':>8}  ms  link axis op bytes unit"
        zero = self.timeline[0].issued if self.timeline else 0.0
        rows = []
        for t in self.timeline:
            times = [(moment - zero) * 1e3 for moment in (t.issued, t.started, t.ended)]
            rows.append(
                " ".join(f"{ms:10.3f}" for ms in times)
                + f" {t.waited * 1e3:8.3f}  {t.link} {t.axis or '-'} {t.op} {t.bytes:,} {t.unit or '-'}"
            )
        return "\n".join([head, *rows])

    # -- what the groups ask ---------------------------------------------------------------------------

    def check_axis(self, axis: str) -> None:
        """Raises Parallel3dError if mesh axis ``axis`` is on no link."""
        if self.axes is not None and axis not in self.axes and axis != WORLD_AXIS:
            raise Parallel3dError(
                f"mesh axis {axis!r} is on no link: axes names {', '.join(map(repr, self.axes)) or 'none'}; "
                f"add {axis!r} with one of the links {', '.join(map(repr, self.links))}"
            )

    def link_of(self, axis: str) -> str:
        """The name of the link that groups of ``axis`` use."""
        return (self.axes or {}).get(axis) or next(iter(self.links))

    def line(self, axis: str, device: torch.device) -> CpuLine | CudaLine:
        """What groups of ``axis`` occupy for tensors of ``device``."""
        if device.type != "cuda":
            device = _CPU
        key = (self.link_of(axis), device)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = line_for(device, self.clock)
        return line

    def begin(
        self, line: CpuLine | CudaLine, op: str, axis: str, size: int, issued: float
    ) -> Transfer:
        """Puts ``size`` bytes on ``line``."""
        link = self.link_of(axis)
        transfer = Transfer(op, issuing.unit, axis, link, size, issued, issued, issued)
        line.begin(transfer, self.links[link].seconds(size))
        self._timeline.append(transfer)
        return transfer


_CPU = torch.device("cpu")
_entered: list[EmulatedNetwork] = []  # at most one: there is one default group


def _make_group(options: Any, _: Any) -> EmulatedGroup:
    if not _entered:
        raise MeshError(f"backend {BACKEND!r} is that of EmulatedNetwork: enter one")
    return EmulatedGroup(_entered[-1], options)
