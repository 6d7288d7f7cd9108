"""Interfaces and names: what keeps nodes from meeting, or lets them meet over the wrong wire."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from itertools import chain

from parallel3d.mesh.agreement import name_ranks
from parallel3d.tools.doctor.facts import Facts, Interface
from parallel3d.tools.doctor.finding import Result, Seen, Severity, across, check

AREA = "network"


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def matches(interfaces: tuple[Interface, ...], value: str) -> list[Interface]:
    """Those that NCCL_SOCKET_IFNAME means: prefixes; after ``=`` whole names; after ``^`` all others."""
    rest = value.strip()
    others, rest = rest.startswith("^"), rest.removeprefix("^")
    whole, rest = rest.startswith("="), rest.removeprefix("=")
    given = [name.strip() for name in rest.split(",") if name.strip()]

    def fits(each: Interface) -> bool:
        names = (
            each.name == n.partition(":")[0] if whole else each.name.startswith(n) for n in given
        )
        return any(names) != others

    return [each for each in interfaces if fits(each)]


def _alternatives(facts: Facts) -> str:
    found = [f"{each.name} ({each.addresses[0]})" for each in facts.usable]
    return f"here are {', '.join(found)}" if found else "no other interface has an address"


def _example(facts: Facts, variable: str) -> str:
    name = facts.usable[0].name if facts.usable else "eth0"
    return f"export {variable}={name}"


def _named_for_gloo(facts: Facts) -> list[str]:
    value = facts.environment.get("GLOO_SOCKET_IFNAME", "")
    return [name.strip() for name in value.split(",") if name.strip()]


@check(
    "gloo-interface-missing",
    AREA,
    Severity.error,
    why="gloo can't make a process group: the rank fails at once, and the others wait for it.",
    do="Name one that is up on this node; nodes may need different values.",
)
def gloo_missing(facts: Facts) -> Result:
    ready = {each.name for each in facts.interfaces if each.up and each.addresses}
    wrong = [name for name in _named_for_gloo(facts) if name not in ready]
    if not wrong:
        return None
    text = f"GLOO_SOCKET_IFNAME={','.join(wrong)} is not up, or not there; {_alternatives(facts)}"
    return Seen(text, _example(facts, "GLOO_SOCKET_IFNAME"))


@check(
    "nccl-interface-missing",
    AREA,
    Severity.error,
    why="NCCL finds no interface for its bootstrap and fails, or hangs where others don't.",
    do="Name one that is up on this node (a prefix will do; ^lo,docker excludes).",
)
def nccl_missing(facts: Facts) -> Result:
    value = facts.environment.get("NCCL_SOCKET_IFNAME", "")
    ready = tuple(each for each in facts.interfaces if each.up and each.addresses)
    if not value or matches(ready, value):
        return None
    text = f"NCCL_SOCKET_IFNAME={value} matches no interface that is up; {_alternatives(facts)}"
    return Seen(text, _example(facts, "NCCL_SOCKET_IFNAME"))


@check(
    "interface-of-this-machine",
    AREA,
    Severity.error,
    why="Its address means another machine on each node: nodes can't reach each other through it.",
    do="Name the interface that leads to the other nodes.",
)
def local_interface(facts: Facts) -> Result:
    if not facts.several_nodes:
        return None
    by_name = {each.name: each for each in facts.interfaces}
    named = {"GLOO_SOCKET_IFNAME": [by_name[n] for n in _named_for_gloo(facts) if n in by_name]}
    value = facts.environment.get("NCCL_SOCKET_IFNAME", "")
    named["NCCL_SOCKET_IFNAME"] = matches(facts.interfaces, value) if value else []
    for variable, found in named.items():
        if found and all(each.is_loopback or each.is_of_containers for each in found):
            text = f"{variable}={facts.environment[variable]} is a loopback or container bridge"
            return Seen(f"{text}; {_alternatives(facts)}", _example(facts, variable))
    return None


@check(
    "no-interface",
    AREA,
    Severity.error,
    why="Other nodes can't be reached without one.",
    do="ip -br address; then set up the interface, or start the container in the host's network",
)
def no_interface(facts: Facts) -> Result:
    if facts.several_nodes and facts.interfaces and not facts.usable:
        names = ", ".join(f"{i.name} {'up' if i.up else 'down'}" for i in facts.interfaces)
        return f"no interface but loopback and container bridges is up with an address ({names})"
    return None


@check(
    "several-interfaces",
    AREA,
    Severity.note,
    why="gloo takes the one this node's name resolves to, NCCL the first: not the same, or a slow one.",
    do="Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the one that leads to the other nodes.",
)
def several(facts: Facts) -> Result:
    variables = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    free = [name for name in variables if not facts.environment.get(name)]
    if not facts.several_nodes or not free or len(facts.usable) < 2:
        return None
    found = ", ".join(
        f"{i.name} ({i.addresses[0]}{f', {i.speed} Mb/s' if i.speed else ''})" for i in facts.usable
    )
    return f"{found}; and {' and '.join(free)} not set"


@check(
    "hostname-unresolved",
    AREA,
    Severity.error,
    why="gloo asks for the address of this machine's name; without one it listens on the loopback, which no "
    "other node reaches.",
    do="Add the name to /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME.",
)
def unresolved(facts: Facts) -> Result:
    if not facts.host_error or not facts.several_nodes or _named_for_gloo(facts):
        return None
    text = f"{facts.place.host} does not resolve: {facts.host_error}"
    return Seen(text, _example(facts, "GLOO_SOCKET_IFNAME"))


@check(
    "hostname-is-loopback",
    AREA,
    Severity.error,
    why="gloo tells the other nodes this address, where they find themselves. Debian writes such a line.",
    do="Give the name its real address in /etc/hosts, or set GLOO_SOCKET_IFNAME.",
)
def loopback_name(facts: Facts) -> Result:
    if not facts.several_nodes or _named_for_gloo(facts) or not facts.host_addresses:
        return None
    if not _is_loopback(facts.host_addresses[0]):
        return None
    text = f"{facts.place.host} resolves to {facts.host_addresses[0]}"
    return Seen(text, _example(facts, "GLOO_SOCKET_IFNAME"))


@check(
    "master-unresolved",
    AREA,
    Severity.error,
    why="This node finds no way to the store where all ranks meet.",
    do="Use a name that all nodes resolve (getent hosts NAME), or the address.",
)
def master_unresolved(facts: Facts) -> Result:
    if not facts.master_error:
        return None
    return f"MASTER_ADDR={facts.environment.get('MASTER_ADDR', '')}: {facts.master_error}"


@check(
    "master-is-loopback",
    AREA,
    Severity.error,
    why="Each node looks for the store on itself: they never meet.",
    do="Set MASTER_ADDR (torchrun: --rdzv-endpoint or --master-addr) to the first node's name or address.",
)
def master_loopback(facts: Facts) -> Result:
    found = facts.master_addresses
    if facts.several_nodes and found and _is_loopback(found[0]):
        return f"MASTER_ADDR={facts.environment.get('MASTER_ADDR', '')} resolves to {found[0]}"
    return None


@check(
    "store-unreachable",
    AREA,
    Severity.error,
    why="Ranks wait there for each other for minutes, and fail.",
    do="Does rank 0 run, is its port free, and open in the firewall? nc -vz $MASTER_ADDR $MASTER_PORT",
)
def store_unreachable(facts: Facts) -> Result:
    return facts.store_error or None


@check(
    "infiniband-down",
    AREA,
    Severity.warning,
    why="NCCL leaves the port out: this node has less bandwidth than the others, and all wait for it.",
    do="ibstat; look at cable, switch port and subnet manager",
)
def infiniband_down(facts: Facts) -> Result:
    down = [f"{port} is {state}" for port, state in facts.infiniband.items() if state != "ACTIVE"]
    return ", ".join(down) if down and facts.devices else None


# What differs between processes or nodes, and how they lie on each other.

BETWEEN = "between nodes"
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
    BETWEEN,
    Severity.error,
    why="A job of theirs would wait for them as long as its timeouts say.",
    do="Look at these ranks' output: did they start, and reach MASTER_ADDR? Are all nodes up?",
)
def missing(facts: Facts) -> Result:
    """Found where ranks meet."""
    return None


@check(
    "mesh-does-not-fit",
    BETWEEN,
    Severity.error,
    why="build_mesh would refuse it.",
    do="Choose sizes whose product is the number of ranks; one may be -1.",
)
def does_not_fit(facts: Facts) -> Result:
    """Found where collectives are measured."""
    return None


@across(
    "versions-differ",
    BETWEEN,
    Severity.error,
    why="Ranks would speak different protocols: a hang in NCCL's first collective, or other numbers.",
    do="Use one image or environment on all nodes.",
)
def versions(facts: Mapping[int, Facts]) -> Result:
    return odd_ones(facts, list(_VERSIONS), lambda own, name: own.versions.get(name, "none"))


@across(
    "drivers-differ",
    BETWEEN,
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
    BETWEEN,
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
    BETWEEN,
    Severity.warning,
    why="Right only where nodes name their interfaces differently; otherwise one goes over another network.",
    do="Use a prefix that fits all nodes, or one value for all.",
)
def interfaces(facts: Mapping[int, Facts]) -> Result:
    return odd_ones(facts, list(_INTERFACES), lambda own, name: own.environment.get(name, _UNSET))


@across(
    "devices-differ",
    BETWEEN,
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
    BETWEEN,
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
    BETWEEN,
    Severity.warning,
    why="Groups of tp then lie across nodes, which is slow, and meshes are harder to choose.",
    do="Start the same number of ranks on every node.",
)
def unequal(facts: Mapping[int, Facts]) -> Result:
    return odd_ones(facts, ["ranks of the node"], lambda own, name: str(own.place.local_world_size))


@across(
    "same-hostname",
    BETWEEN,
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
    BETWEEN,
    Severity.warning,
    why="Logs and traces of nodes don't fit together; tokens and certificates may be refused.",
    do="chronyc tracking (or timedatectl): let all nodes follow one time server",
)
def clocks(facts: Mapping[int, Facts]) -> Result:
    return _clocks(facts, _APART, _TOO_FAR)


@across(
    "clocks-too-far-apart",
    BETWEEN,
    Severity.error,
    why="torchrun's c10d rendezvous compares clocks: a node 15 s behind is forgotten as if it had died.",
    do="chronyc makestep (or timedatectl set-ntp true), then let all nodes follow one time server",
)
def clocks_far(facts: Mapping[int, Facts]) -> Result:
    return _clocks(facts, _TOO_FAR, float("inf"))
