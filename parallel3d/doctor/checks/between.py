"""What differs between processes or nodes, and how they lie on each other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from itertools import chain

from parallel3d.doctor.facts import Facts
from parallel3d.doctor.finding import Result, Seen, Severity, across, check
from parallel3d.mesh.naming import name_ranks

__all__ = ["odd_ones"]

AREA = "between nodes"
_UNSET = "not set"
# Alike or the job hangs or computes other things; the driver may differ.
_VERSIONS = ("python", "torch", "cuda", "nccl", "parallel3d")
_NOT_COMPARED = (
    "TORCH_HOME",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_LOGS_OUT",
    "TORCH_TRACE",
    "NCCL_HOSTID",
)
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG_FILE")
_COMPARED = ("NCCL_", "TORCH_", "GLOO_", "PYTORCH_", "CUDA_DEVICE_", "CUDA_LAUNCH_", "OMP_")
_APART, _TOO_FAR = 1.0, 10.0  # seconds


def odd_ones(
    facts: Mapping[int, Facts], names: list[str], value: Callable[[Facts, str], str]
) -> Seen | None:
    """Where values of ``names`` differ: each with who has it, the rarest being the odd ones."""
    parts, odd = [], set()
    for name in names:
        by_value: dict[str, list[int]] = defaultdict(list)
        for rank, own in sorted(facts.items()):
            by_value[value(own, name)].append(rank)
        if len(by_value) < 2:
            continue
        ordered = sorted(by_value.items(), key=lambda item: -len(item[1]))
        odd |= {rank for _, ranks in ordered[1:] for rank in ranks}
        said = (f"{text} on {_places(facts, ranks)}" for text, ranks in ordered)
        parts.append(f"{name}: {'; '.join(said)}")
    return Seen("\n".join(parts), ranks=tuple(sorted(odd))) if parts else None


def _places(facts: Mapping[int, Facts], ranks: list[int]) -> str:
    """``node-1 (ranks 4-7)``, or ranks alone where they are part of a node."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, own in facts.items():
        by_host[own.place.host].append(rank)
    hosts = [host for host, all_ranks in by_host.items() if set(all_ranks) <= set(ranks)]
    whole = {rank for host in hosts for rank in by_host[host]}
    if whole != set(ranks) or len(by_host) == 1:
        return name_ranks(ranks)
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    return f"{shown} ({name_ranks(ranks)})"


@check(
    "ranks-missing",
    AREA,
    Severity.error,
    why="A job of theirs would wait for them as long as its timeouts say.",
    do="Look at these ranks' output: did they start, and reach MASTER_ADDR? Are all nodes up?",
)
def missing(facts: Facts) -> Result:
    """Found where ranks meet."""
    return None


@check(
    "mesh-does-not-fit",
    AREA,
    Severity.error,
    why="build_mesh would refuse it.",
    do="Choose sizes whose product is the number of ranks; one may be -1.",
)
def does_not_fit(facts: Facts) -> Result:
    """Found where collectives are measured."""
    return None


@across(
    "versions-differ",
    AREA,
    Severity.error,
    why="Ranks would speak different protocols: a hang in NCCL's first collective, or other numbers.",
    do="Use one image or environment on all nodes.",
)
def versions(facts: Mapping[int, Facts]) -> Result:
    return odd_ones(facts, list(_VERSIONS), lambda own, name: own.versions.get(name, "none"))


@across(
    "drivers-differ",
    AREA,
    Severity.warning,
    why="NCCL may choose other transports on some nodes; performance differs.",
    do="Update the nodes that are behind.",
)
def drivers(facts: Mapping[int, Facts]) -> Result:
    return odd_ones(facts, ["driver"], lambda own, name: own.versions.get(name, "none"))


def _names(facts: Mapping[int, Facts], *, wanted: Callable[[str], bool]) -> list[str]:
    return sorted({name for own in facts.values() for name in own.environment if wanted(name)})


@across(
    "settings-differ",
    AREA,
    Severity.error,
    why="Ranks that communicate by different rules wait for each other for ever, or are slow.",
    do="Set the variable for the whole job: in the launch file, not in one node's profile.",
)
def settings(facts: Mapping[int, Facts]) -> Result:
    def wanted(name: str) -> bool:
        return name.startswith(_COMPARED) and name not in (*_NOT_COMPARED, *_INTERFACES)

    return odd_ones(
        facts, _names(facts, wanted=wanted), lambda own, name: own.environment.get(name, _UNSET)
    )


@across(
    "interfaces-differ",
    AREA,
    Severity.warning,
    why="Right only where nodes name their interfaces differently; otherwise one goes over another network.",
    do="Use a prefix that fits all nodes, or one value for all.",
)
def interfaces(facts: Mapping[int, Facts]) -> Result:
    return odd_ones(facts, list(_INTERFACES), lambda own, name: own.environment.get(name, _UNSET))


@across(
    "devices-differ",
    AREA,
    Severity.warning,
    why="All wait for the slowest, and the smallest memory sets the batch.",
    do="Use equal nodes, or leave the odd one out.",
)
def devices(facts: Mapping[int, Facts]) -> Result:
    def kind(own: Facts, name: str) -> str:
        counted = Counter(f"{d.name}, {d.total / 2**30:.0f} GiB" for d in own.devices)
        return " and ".join(f"{count} x {each}" for each, count in counted.items()) or "none"

    return odd_ones(facts, ["devices"], kind)


@across(
    "device-shared",
    AREA,
    Severity.error,
    why="NCCL refuses two ranks on one device (Duplicate GPU detected).",
    do="torch.cuda.set_device(LOCAL_RANK), and CUDA_VISIBLE_DEVICES unset or one device for each rank",
)
def shared(facts: Mapping[int, Facts]) -> Result:
    users: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, own in sorted(facts.items()):
        count = len(own.devices)
        index = 0 if count == 1 else own.place.local_rank
        if index < count and own.devices[index].uuid:
            users[own.place.host, own.devices[index].uuid].append(rank)
    twice = {key: ranks for key, ranks in users.items() if len(ranks) > 1}
    if not twice:
        return None
    text = "; ".join(f"{name_ranks(ranks)} on {host}" for (host, _), ranks in twice.items())
    return Seen(f"one device for {text}", ranks=tuple(sorted(chain(*twice.values()))))


@across(
    "nodes-differ-in-ranks",
    AREA,
    Severity.warning,
    why="Groups of tp then lie across nodes, which is slow, and meshes are harder to choose.",
    do="Start the same number of ranks on every node.",
)
def unequal(facts: Mapping[int, Facts]) -> Result:
    return odd_ones(facts, ["ranks of the node"], lambda own, name: str(own.place.local_world_size))


@across(
    "same-hostname",
    AREA,
    Severity.warning,
    why="torchrun and gloo tell machines by their names: nodes of one name are taken for one.",
    do="hostnamectl set-hostname a name of its own for each",
)
def same_name(facts: Mapping[int, Facts]) -> Result:
    nodes: dict[str, set[int]] = defaultdict(set)
    for own in facts.values():
        if own.place.node >= 0:
            nodes[own.place.host].add(own.place.node)
    twice = [
        f"{len(found)} nodes are called {host}" for host, found in nodes.items() if len(found) > 1
    ]
    return "; ".join(twice) or None


def _clocks(facts: Mapping[int, Facts], least: float, most: float) -> Result:
    off = {
        rank: own.clock
        for rank, own in sorted(facts.items())
        if own.clock is not None and least <= abs(own.clock) - own.clock_error < most
    }
    if not off:
        return None
    said = (
        f"{facts[r].place.host} is {abs(s):.3g} s {'ahead of' if s > 0 else 'behind'} rank 0's node"
        for r, s in off.items()
    )
    return Seen("; ".join(said), ranks=tuple(off))


@across(
    "clocks-apart",
    AREA,
    Severity.warning,
    why="Logs and traces of nodes don't fit together; tokens and certificates may be refused.",
    do="chronyc tracking (or timedatectl): let all nodes follow one time server",
)
def clocks(facts: Mapping[int, Facts]) -> Result:
    return _clocks(facts, _APART, _TOO_FAR)


@across(
    "clocks-too-far-apart",
    AREA,
    Severity.error,
    why="torchrun's c10d rendezvous compares clocks: a node 15 s behind is forgotten as if it had died.",
    do="chronyc makestep (or timedatectl set-ntp true), then let all nodes follow one time server",
)
def clocks_far(facts: Mapping[int, Facts]) -> Result:
    return _clocks(facts, _TOO_FAR, float("inf"))
