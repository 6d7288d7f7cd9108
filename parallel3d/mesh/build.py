"""build_mesh: from a MeshLayout to torch's DeviceMesh, after all ranks have agreed on it."""

import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh

from parallel3d._torch.groups import let_gloo_finish_at_exit
from parallel3d._util.arguments import counted, without_gloo
from parallel3d._util.version import __version__
from parallel3d.errors import MeshError, PeerFailureError
from parallel3d.mesh.agreement import DEFAULT_TIMEOUT, check_agreement, name_ranks
from parallel3d.mesh.axes import AXES, axis_named, guess, listed
from parallel3d.mesh.exchange import StoreExchange
from parallel3d.mesh.failures import print_once
from parallel3d.mesh.joined import axis_sizes, expert_view, joined_mesh, make_expert_view
from parallel3d.mesh.layout import MeshLayout
from parallel3d.mesh.store import fresh_store, next_table, others, outlives_ranks

_AGAIN = timedelta(seconds=30)  # a rank that came just in time gets to report

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Variables that configure communication. A difference between ranks is legitimate (nodes with other
# network interfaces) or the cause of a hang that is hard to find: hence the warning.
_COMPARED_PREFIXES = ("NCCL_", "TORCH_", "GLOO_")
# Paths that a rank writes to or caches in; these differ by design.
_NOT_COMPARED = ("TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCH_LOGS_OUT", "TORCH_TRACE")


def build_mesh(
    layout: MeshLayout, *, device_type: str | None = None, timeout: timedelta | None = None
) -> DeviceMesh:
    """Builds the DeviceMesh of ``layout``: axes ``("replicate", "shard", "tp")``, ``"cp"`` before tp if > 1.

    With cp the process groups of shard x cp, which parameters are sharded over, are made too; with ep those
    of the view (replicate, efsdp, ep), see ``mesh.joined.ExpertView``.

    Before any group is made, all ranks compare layout, device type and the versions of torch,
    parallel3d and Python; and, for a warning only, their ``NCCL_*``, ``TORCH_*`` and ``GLOO_*``
    variables; and a machine must have a device for each of its ranks. Then each axis of more than
    one rank runs its first collective, in the order of the axes. Without a default process group,
    one is started: from ``torchrun``'s environment, or in a plain single process a group of one
    rank. The caller ends it with ``torch.distributed.destroy_process_group()``.

    Args:
        layout: the sizes of the axes; a -1 is resolved from the world size.
        device_type: ``"cuda"``, ``"cpu"``, ...; by default that of the environment variable
            ``PARALLEL3D_DEVICE``, else the accelerator if there is one that torch.distributed has a backend
            for, else ``"cpu"``.
        timeout: how long ranks wait for each other's report; by default the process group's timeout, or
            ten minutes without one. After 30 s a rank prints which are missing. Collectives keep torch's.

    Raises:
        MeshError: the layout does not fit the world, there is no way to start a process group, the
            device type is not one of this machine or of the process group, the machine has fewer devices
            than ranks, or an axis's first collective failed.
        AgreementError: the ranks were started with different settings, or some did not report in
            time. The same error on every rank.
    """
    if not isinstance(layout, MeshLayout):
        raise MeshError(
            f"build_mesh needs a MeshLayout, not {layout!r}: "
            f"for example MeshLayout(replicate=2, shard=-1, tp=4)."
        )
    if device_type is None:
        device_type = default_device_type()
    if dist.is_initialized():
        world_size = dist.get_world_size()
        _check_launch(layout, device_type, world_size, timeout)
        resolved = layout.resolve(world_size)
        _check_backend(device_type)
        return _init_mesh(resolved, device_type)
    resolved = _start_group(layout, device_type, timeout)
    try:
        return _init_mesh(resolved, device_type)
    except BaseException:
        dist.destroy_process_group()
        raise


def read_layout(mesh: DeviceMesh) -> MeshLayout:
    """Returns the sizes of ``mesh``'s axes by name; an axis it does not have counts as 1.

    Args:
        mesh: has some of the axes ``replicate``, ``shard``, ``cp`` and ``tp``, in this order; or
            ``dp_replicate`` and ``dp_shard``. The mesh of parameters has shard and cp as one, ``shard_cp``.

    Raises:
        MeshError: the axes have no names, unknown names, or another order.
    """
    rule = f"An axis is named {listed(AXES[:-1])} or {AXES[-1]!r}, in this order"
    if not mesh.mesh_dim_names:
        raise MeshError(
            f"the axes of the mesh of shape {tuple(mesh.shape)} have no names. {rule}: "
            f"make it with build_mesh, or pass mesh_dim_names= to init_device_mesh."
        )
    sizes = axis_sizes(mesh)
    names = [_canonical(name) for name in sizes]
    unknown = [name for name in names if name not in AXES]
    if unknown:
        raise MeshError(
            f"the mesh has the axes {mesh.mesh_dim_names}, of which {unknown[0]!r} is unknown. {rule}. "
            f"Slice the mesh first, for example mesh['shard', 'tp']."
        )
    if names != sorted(set(names), key=AXES.index):
        raise MeshError(f"the mesh has the axes {mesh.mesh_dim_names}. {rule}, each at most once.")
    view = expert_view(mesh)
    ep = 1 if view is None else view.ep.size()
    return MeshLayout(**dict(zip(names, sizes.values(), strict=True)), ep=ep)


def name_axes(mesh: DeviceMesh, axes: Mapping[str, str] | None = None) -> DeviceMesh:
    """Returns ``mesh`` over the same process groups, its axes renamed by ``axes`` (see ``parallelize``)."""
    names = mesh.mesh_dim_names
    if axes is not None:
        _check_axes(mesh, axes)
    if names is None:
        if mesh.ndim == 1 and axes is None:
            return mesh  # it shards, as in torch
        raise MeshError(
            f"the axes of the mesh of shape {tuple(mesh.shape)} have no names: which of them are "
            f"{listed(AXES)}? Make it with build_mesh, or give init_device_mesh mesh_dim_names="
        )
    renamed = tuple((axes or {}).get(name, name) for name in names)
    unknown = [name for name in renamed if _canonical(name) not in AXES]
    if unknown:
        shown = ", ".join(f"{n}={s}" for n, s in zip(names, mesh.shape, strict=True))
        guesses = {name: guess(name) for name in unknown}
        known = [name for name in names if (axes or {}).get(name, name) not in unknown]
        say = f"Say what they are, such as parallelize(..., axes={_quoted(guesses)}), or give"
        if {*guesses.values()} & {_canonical((axes or {}).get(name, name)) for name in known}:
            say = "Give"  # that axis is there already: another one, such as of pipeline stages
        raise MeshError(
            f"mesh ({shown}): the axes {listed(unknown)} are not known; an axis is {listed(AXES)}. {say} a "
            f"submesh without them{f', mesh[{_quoted(known)}]' if known else ''}"
        )
    if len(set(map(_canonical, renamed))) < len(renamed):
        raise MeshError(f"axes={dict(axes or {})!r} gives two axes of {names} one name: {renamed}")
    if renamed == names:
        return mesh
    groups: Any = [mesh.get_group(i) for i in range(mesh.ndim)]
    if mesh.ndim == 1:
        return DeviceMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=renamed)
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=mesh.mesh, mesh_dim_names=renamed)


def _quoted(values: list[str] | dict[str, str]) -> str:
    """Returns ``values`` as source text: an index such as ``"shard", "tp"``, or a dict."""
    return json.dumps(values).strip("[]")


def _canonical(name: str) -> str:
    """Returns the axis's own name if ``name`` is one of its other names, else ``name``."""
    axis = axis_named(name)
    return name if axis is None else axis.name


def _check_axes(mesh: DeviceMesh, axes: Any) -> None:
    if not isinstance(axes, Mapping) or not all(isinstance(name, str) for name in axes):
        raise MeshError(
            f"axes is {axes!r}; it must be a dict from the mesh's names to ours, such as "
            '{"data_parallel": "shard", "tensor_parallel": "tp"}'
        )
    for name, target in axes.items():
        if name not in (mesh.mesh_dim_names or ()):
            raise MeshError(
                f"axes: {name!r} is not an axis of the mesh, which has {mesh.mesh_dim_names or 'no names'}"
            )
        if target not in AXES:
            raise MeshError(f"axes: {name!r} is given as {target!r}; an axis is {listed(AXES)}")


def _init_mesh(layout: MeshLayout, device_type: str) -> DeviceMesh:
    mesh = init_device_mesh(device_type, layout.sizes, mesh_dim_names=layout.axes)
    if device_type == "cpu":
        let_gloo_finish_at_exit()
    warm_up(mesh)
    if layout.cp > 1:  # now, as making groups is collective
        warm_up(joined_mesh(mesh)["shard_cp"])
    if layout.ep > 1:
        view = make_expert_view(mesh, layout.ep)
        warm_up(view.ep)
        warm_up(view.data)
    return mesh


def warm_up(mesh: DeviceMesh) -> None:
    """All-reduces one number over each axis of ``mesh`` that has several ranks, outermost first.

    NCCL makes a group's communicator in its first collective. Made lazily, communicators would be made in
    the order in which a program happens to use them, under memory pressure, in the middle of a step: a
    failure is then a hang far from its cause. Nothing happens without other real ranks.
    """
    if others() is None:
        return
    for axis in mesh.mesh_dim_names or ():
        group = mesh.get_group(axis)
        if group.size() == 1:
            continue
        ranks = dist.get_process_group_ranks(group)
        what = f"the first collective on axis {axis!r} ({name_ranks(ranks)}, {mesh.device_type})"
        one = torch.ones(1, device=mesh.device_type)
        try:
            dist.all_reduce(one, group=group)
            total = int(one.item())
        except PeerFailureError:
            raise
        except RuntimeError as error:
            raise MeshError(
                f"{what} failed: {without_gloo(str(error)).removesuffix('.')}. One of them has ended, or "
                "they can't reach each other: look at their output first, then at their network "
                "(NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME, "
                "GLOO_SOCKET_IFNAME)."
            ) from error
        if total != group.size():
            raise MeshError(f"{what} gave {total} for the number of its ranks, {group.size()}.")


DEVICE = "PARALLEL3D_DEVICE"
"""Name of the environment variable with the device type that is used where none is given."""


def default_device_type() -> str:
    """Returns ``PARALLEL3D_DEVICE`` if set, else the accelerator's type if torch.distributed has a backend
    for it, else ``"cpu"``."""
    return os.environ.get(DEVICE) or _accelerator_type()


def _accelerator_type() -> str:
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        # torch names gloo for devices without a backend of their own (mps), whose tensors it can't carry.
        if accelerator is not None and _backend_for(accelerator.type) not in (None, "gloo"):
            return accelerator.type
    return "cpu"


def _backend_for(device_type: str) -> str | None:
    """Returns the backend torch.distributed uses for this kind of device; ``None`` if it has none."""
    try:
        return dist.get_default_backend_for_device(device_type)
    except (RuntimeError, ValueError):
        return None


def _check_launch(
    layout: MeshLayout,
    device_type: str,
    world_size: int,
    timeout: timedelta | None,
    store: dist.Store | None = None,
    rank: int | None = None,
) -> None:
    """Raises if ranks have different settings, or a machine has fewer devices than ranks."""
    try:
        layout_text = str(layout.resolve(world_size))
    except MeshError:  # reported all the same: the others would wait for a rank that raised here
        layout_text = str(layout)
    settings = {
        "layout": layout_text,
        "world size": str(world_size),
        "device type": device_type,
        "torch": torch.__version__,
        "parallel3d": __version__,
        # Ranks can't disagree about anything that a patch release changes.
        "python": ".".join(platform.python_version_tuple()[:2]),
    }
    variables = {
        name: text
        for name, text in sorted(os.environ.items())
        if name.startswith(_COMPARED_PREFIXES) and name not in _NOT_COMPARED
    }
    found = others() if store is None else (store, rank or 0, world_size)
    limit = min(timeout or _AGAIN, _AGAIN)
    lacking = "" if found is None else _too_few_devices(device_type, *found[:2], limit)
    check_agreement(
        "mesh",
        settings | variables | {"devices": lacking},
        timeout=timeout,
        warn_only=variables.keys(),
        store=store,
        rank=rank,
        world_size=world_size,
        explain={
            "devices": lambda found: "; ".join(
                f"{name_ranks(ranks)}: {text}" for text, ranks in found.items() if text
            )
        },
    )
    if lacking:
        raise MeshError(f"{lacking}.")


def _too_few_devices(device_type: str, store: dist.Store, rank: int, timeout: timedelta) -> str:
    """Returns an error message if this machine has more ranks than devices, else ``""``.

    A rank that sees fewer devices than there are ranks may have been shown only its own by the launcher. So
    it reads from the store which devices the other ranks of the machine see.
    """
    ranks, local_rank = (os.environ.get(f"LOCAL_{what}", "") for what in ("WORLD_SIZE", "RANK"))
    if device_type == "cpu" or not ranks.isdecimal() or not local_rank.isdecimal():
        return ""
    seen = _devices_seen(device_type, local_rank)
    host = dist.PrefixStore(platform.node(), next_table(store, "devices", rank))
    devices = StoreExchange(host, int(local_rank), range(int(ranks)), timeout)
    devices.put(seen)
    if len(seen) >= int(ranks):
        return ""
    by_rank: dict[int, list[str]] = {}
    with suppress(dist.DistNetworkError):  # said by the comparison that follows, as who is missing
        by_rank = devices.collect()
    if len(by_rank) < int(ranks):
        return ""
    count = len({name for names in by_rank.values() for name in names})
    if count >= int(ranks):
        return ""
    start = f"start {count} (torchrun --nproc-per-node {count}), or " if count else ""
    return (
        f"there are {ranks} ranks on a machine with {counted(count, f'{device_type} device')}: {start}set "
        f"{DEVICE}=cpu, which build_mesh without device_type= reads, to run on the CPU"
    )


def _devices_seen(device_type: str, local_rank: str) -> list[str]:
    """Returns a name for each device that this process sees, unique on the machine."""
    module = torch.get_device_module(device_type)
    properties = getattr(module, "get_device_properties", lambda index: None)
    # Where devices have no such name they are taken for this rank's own, as no error can be sure.
    return [
        str(getattr(properties(index), "uuid", f"{index} of {local_rank}"))
        for index in range(torch.accelerator.device_count())
    ]


def _start_group(layout: MeshLayout, device_type: str, timeout: timedelta | None) -> MeshLayout:
    """Starts the default process group and returns the layout resolved for its world."""
    missing = [name for name in _RENDEZVOUS if not os.environ.get(name)]
    if not missing:
        # The process group, which could hang, comes after the check.
        store, rank, world_size = next(dist.rendezvous("env://"))
        timeout = timeout or DEFAULT_TIMEOUT
        if outlives_ranks():
            begin = time.monotonic()
            store = fresh_store(store, rank, world_size, timeout)
            # Who has not come by now is named soon, and not waited for again.
            waited = timedelta(seconds=time.monotonic() - begin)
            timeout = max(timeout - waited, min(timeout, _AGAIN))
        _check_launch(layout, device_type, world_size, timeout, store=store, rank=rank)
    elif {"RANK", "WORLD_SIZE"} <= set(missing):
        store, rank, world_size = dist.HashStore(), 0, 1
    else:
        raise MeshError(
            f"this process is a rank of a job, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: to meet, ranks need "
            f"{', '.join(_RENDEZVOUS)}. Start the script with torchrun, which sets them."
        )
    try:
        resolved = layout.resolve(world_size)
    except MeshError as error:
        if world_size > 1:
            raise
        ranks = layout.world_size if layout.is_resolved else "N"
        raise MeshError(
            f"{error} This is a single process: to run several, start the script with "
            f"torchrun --nproc-per-node {ranks} SCRIPT."
        ) from None
    backend = backend_string(device_type)
    set_device(device_type, rank)
    # torch itself uses this prefix, which keeps its keys apart from ours. Collectives keep torch's timeout.
    default_store = dist.PrefixStore("default_pg", store)
    dist.init_process_group(backend, store=default_store, rank=rank, world_size=world_size)
    print_once()
    return resolved


def backend_string(device_type: str) -> str:
    """Returns the backends for ``init_process_group``: gloo for the CPU, and the device type's own."""
    own = _backend_for(device_type)
    if own is None:
        given = f" (of {DEVICE})" if os.environ.get(DEVICE) == device_type else ""
        raise MeshError(
            f"device_type={device_type!r}{given}: torch.distributed has no backend for it. "
            f"On this machine it must be {_device_types()}."
        )
    return "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:{own}"


def set_device(device_type: str, rank: int) -> None:
    """Makes device LOCAL_RANK, or the only visible one, the current device of this process."""
    if device_type == "cpu":
        return
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device_type:
        raise MeshError(
            f"device_type={device_type!r}: this machine has none. Here it must be {_device_types()}."
        )
    count = torch.accelerator.device_count()
    # Some launchers show each process its own device only.
    index = 0 if count == 1 else int(os.environ.get("LOCAL_RANK", rank % count))
    if not 0 <= index < count:
        raise MeshError(
            f"LOCAL_RANK={index}, but this machine shows {count} {device_type} devices: "
            f"start at most {count} ranks per machine (torchrun --nproc-per-node {count})."
        )
    torch.accelerator.set_device_index(index)


def _device_types() -> str:
    default = _accelerator_type()
    return "'cpu'" if default == "cpu" else f"'cpu' or {default!r}"


def _check_backend(device_type: str) -> None:
    """Raises MeshError if the process group can't carry tensors of ``device_type``."""
    carried = dict(part.partition(":")[::2] for part in dist.get_backend_config().split(","))
    if device_type not in carried:
        raise MeshError(
            f"device_type={device_type!r}, but the process group carries "
            f"{', '.join(sorted(carried))} only. Pass one of these, or start the group with "
            f"a backend for it (for CUDA 'cpu:gloo,cuda:nccl'), or let build_mesh start it."
        )
