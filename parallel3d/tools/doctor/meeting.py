"""Meeting: the ranks of a job exchange what they have found, through the store, without a process group.

Nothing in here waits for ever: who does not come in time is named.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.mesh import MeshLayout, build_mesh
from parallel3d.mesh.build import backend_string, default_device_type, set_device
from parallel3d.mesh.store import fresh_store, outlives_ranks
from parallel3d.planner.calibrate import COLLECTIVES, collective_seconds
from parallel3d.planner.cluster import gpus
from parallel3d.tools.doctor.collecting import try_store
from parallel3d.tools.doctor.facts import Place
from parallel3d.tools.doctor.measuring import SMALL

_PAUSE = 0.02
_ROUNDS = 5


class Meeting:
    """One rank's part of it. All ranks call the same methods in the same order.

    Args:
        store: nobody else uses.
        seconds: how long others are waited for.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, seconds: float) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.seconds = seconds
        self._waited_for = set(range(world_size))  # on rank 0: who has always come so far

    def put(self, key: str, text: str = "") -> None:
        """Sets a key.

        Raises:
            MeshError: the store has gone.
        """
        try:
            self.store.set(key, text)
        except RuntimeError as error:
            raise MeshError(f"rank 0 has gone: {str(error).splitlines()[0]}") from error

    def gather(self, topic: str, value: Any) -> dict[int, Any]:
        """On rank 0: rank -> its value (JSON), of those that came in time; elsewhere empty."""
        self.put(f"{topic}/{self.rank}", json.dumps(value))
        found: dict[int, Any] = {}
        if self.rank:
            return found
        end = time.monotonic() + self.seconds
        while late := self._waited_for - set(found):
            for rank in late:
                if self.store.check([f"{topic}/{rank}"]):
                    found[rank] = json.loads(self.store.get(f"{topic}/{rank}"))
            if time.monotonic() > end:
                self._waited_for = set(found)  # once is enough
                break
            time.sleep(_PAUSE)
        return dict(sorted(found.items()))

    def tell(self, topic: str, value: Any = None) -> Any:
        """Rank 0's value, on all ranks.

        Raises:
            MeshError: rank 0 has not told it in time.
        """
        if self.rank == 0:
            self.put(topic, json.dumps(value))
            return value
        end = time.monotonic() + 3 * self.seconds  # rank 0 waits for others, more than once
        try:
            while not self.store.check([topic]):
                if time.monotonic() > end:
                    raise MeshError(
                        f"rank 0 has not said {topic!r} within {3 * self.seconds:.0f} s"
                    )
                time.sleep(_PAUSE)
            return json.loads(self.store.get(topic))
        except RuntimeError as error:  # the store's host has gone
            raise MeshError(f"rank 0 has gone: {str(error).splitlines()[0]}") from error

    def part(self) -> None:
        """The end: rank 0, which may host the store, stays until the others have read what they need."""
        self.put(f"gone/{self.rank}")
        end = time.monotonic() + 5
        others = [f"gone/{rank}" for rank in self._waited_for]
        while self.rank == 0 and not self.store.check(others) and time.monotonic() < end:
            time.sleep(_PAUSE)


def meet(place: Place, address: str, port: int, seconds: float) -> Meeting:
    """Joins the other ranks of the job.

    Raises:
        MeshError: the store can't be reached within ``seconds``, or its port is taken.
    """
    hosted = outlives_ranks()
    hosts_it = place.rank == 0 and not hosted
    if hosts_it:
        _check_port(port)
    else:
        _wait_for_store(address, port, seconds)
    try:
        store: dist.Store = dist.TCPStore(
            address,
            port,
            None,
            is_master=hosts_it,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise MeshError(f"{address}:{port}: {str(error).splitlines()[0]}") from error
    if hosted:
        store = fresh_store(store, place.rank, place.world_size, timedelta(seconds=seconds))
    return Meeting(dist.PrefixStore("doctor", store), place.rank, place.world_size, seconds)


def _check_port(port: int) -> None:
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind(("", port))
        except OSError as error:
            raise MeshError(
                f"port {port} (MASTER_PORT), where rank 0 is to host the store: {error.strerror}"
            ) from error


def _wait_for_store(address: str, port: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while why := try_store(address, port, min(5.0, seconds)):
        if time.monotonic() > end:
            raise MeshError(why)
        time.sleep(0.2)


def clock_offset(
    meeting: Meeting, nodes: Sequence[int], now: Callable[[], float] = time.time
) -> tuple[float | None, float]:
    """(seconds this rank's clock is ahead of rank 0's, how sure that is); rank 0 is asked several times, and
    the quickest answer counts. (None, 0) on ranks that are not in ``nodes``.

    Args:
        nodes: one rank of each node, without rank 0's; the same on all ranks.
        now: the clock.
    """
    if meeting.rank == 0:
        for rank in nodes:
            for turn in range(_ROUNDS):
                if not _wait(meeting, f"ask/{rank}/{turn}"):
                    break
                meeting.put(f"time/{rank}/{turn}", repr(now()))
        return 0.0, 0.0
    if meeting.rank not in nodes:
        return None, 0.0
    best: tuple[float, float] | None = None
    for turn in range(_ROUNDS):
        meeting.put(f"ask/{meeting.rank}/{turn}")
        begin = now()
        if not _wait(meeting, f"time/{meeting.rank}/{turn}"):
            break
        end = now()
        there = float(meeting.store.get(f"time/{meeting.rank}/{turn}"))
        sure = (end - begin) / 2
        if turn and (
            best is None or sure < best[1]
        ):  # rank 0 may have been busy with others before
            best = (begin + end) / 2 - there, sure
    return (None, 0.0) if best is None else best


def _wait(meeting: Meeting, key: str) -> bool:
    """Whether it came in time; it blocks at the store, so that it is told at once."""
    try:
        meeting.store.wait([key], timedelta(seconds=meeting.seconds))
    except RuntimeError:
        return False
    return True


# What collectives take on every axis, on this rank; each rank's part of a Measurement.

_BYTES = {"cuda": 2**28, "cpu": 2**22}


def measure(layout: MeshLayout, meeting: Meeting, megabytes: float | None) -> dict[str, Any]:
    """Makes a process group and the mesh, and measures. All ranks call it.

    Args:
        megabytes: of the whole tensor; 256 on CUDA, 4 on the CPU by default.

    Returns:
        ``{"seconds": [[axis, operation, bytes, seconds], ...], "error": ""}``, or the error alone: nothing
        is raised, so that the ranks go on to tell each other.
    """
    device = default_device_type()
    try:
        set_device(device, meeting.rank)
        dist.init_process_group(
            backend_string(device),
            store=dist.PrefixStore("group", meeting.store),
            rank=meeting.rank,
            world_size=meeting.world_size,
            timeout=timedelta(seconds=meeting.seconds),
        )
        nbytes = _BYTES.get(device, 2**28) if megabytes is None else int(megabytes * 1e6)
        return {"seconds": _on_axes(layout, device, max(nbytes, 2 * SMALL)), "error": ""}
    except (Parallel3dError, RuntimeError) as error:  # whatever a backend says
        return {"seconds": [], "error": " ".join(str(error).split())[:500]}
    finally:
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()


def _on_axes(layout: MeshLayout, device: str, nbytes: int) -> list[list[Any]]:
    mesh = build_mesh(layout, device_type=device)
    torch.set_num_threads(1)
    found: list[list[Any]] = []
    for axis in mesh.mesh_dim_names or ():
        group = mesh.get_group(axis)
        size = group.size()
        if size == 1:
            continue
        for name in COLLECTIVES:
            for count in (SMALL, nbytes):
                seconds = collective_seconds(name, count, size, group, device)
                found.append([axis, name, count, seconds])
    return found


# Which of the planner's profiles is of a device that torch names; none rather than a similar one.

_FORMS = ("pcie", "nvl", "sxm")


def profile_of(device: str, gib: float) -> str | None:
    """The profile's name.

    Args:
        device: as torch names it: ``NVIDIA A100-SXM4-80GB``, ``NVIDIA H100 PCIe``.
        gib: of its memory: there are several with one name.
    """
    words = device.lower().replace("-", " ").split()
    form = next((f for f in _FORMS if any(word.startswith(f) for word in words)), "sxm")
    fitting = [
        each
        for each in {gpu.name: gpu for gpu in gpus().values()}.values()
        if each.family in words and (form in each.name or not any(f in each.name for f in _FORMS))
    ]
    near = [each for each in fitting if abs(each.capacity_gib - gib) < 0.1 * gib]
    return min(near, key=lambda each: abs(each.capacity_gib - gib)).name if near else None
